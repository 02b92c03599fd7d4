"""The commands ``export`` and ``import``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.step_arguments import (
    Json,
    RunOrStep,
    chosen,
    local_path,
    output_path,
    parsed_size,
    require_no_step,
    run_to_write,
)
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.formats.huggingface.model_folder import assets_of
from torchax_ckpt.formats.tensor_files import require_new
from torchax_ckpt.formats.weights import Weights
from torchax_ckpt.layout.manifest import array_nodes
from torchax_ckpt.publishing.folder_form import Dtype, FolderForm, Format
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep, about

_PICKLED = (".pt", ".pth", ".bin")  # suffixes of torch.save's files
_FOLDERS, _FOR_TORCH = ("hf", "peft"), ("pt", "dcp")

Patterns = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Names of tensors or modules; may be repeated."),
]


CastTo = Annotated[
    Dtype | None,
    typer.Option(help="Cast floating-point weights to this dtype; not for pt and dcp."),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="safetensors, hf: files of at most this size: 5GB."),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Place of the weights in the step: model/NAME, state/params or optimizer. "
        "Default: the one attached model.",
    ),
]


def export(
    directory: RunOrStep,
    step_and_out: Annotated[
        list[str],
        typer.Argument(
            metavar="[STEP] OUT",
            help="STEP: its number, latest, best:loss, or best:accuracy:max; default: latest. "
            "OUT: a file for pt; a directory for hf, peft and dcp; either for safetensors.",
        ),
    ],
    format: Annotated[
        Literal[Format, "pt", "dcp"] | None,
        typer.Option(
            help="hf: a folder for transformers and vLLM; peft: a folder of adapters; "
            "pt: for torch.load(weights_only=True); dcp: for torch.distributed.checkpoint. "
            "Default: pt if OUT ends in .pt, .pth or .bin, else safetensors."
        ),
    ] = None,
    max_shard_size: MaxShardSize = None,
    dtype: CastTo = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="hf, peft: take config.json and other text files from here, not from the step.",
        ),
    ] = None,
    with_optimizer: Annotated[
        bool,
        typer.Option("--optimizer", help="pt, dcp: write the attached optimizer too."),
    ] = False,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Annotated[
        list[str] | None,
        # Markdown outside of backticks would take two stars for emphasis, and drop them.
        typer.Option(
            metavar="OLD=NEW", help="Write other names: `'transformer.h.*=layers.*'`; repeatable."
        ),
    ] = None,
    at: At = None,
    as_json: Json = False,
) -> int:
    """Writes the weights of a step to files for other programs; stores each tied weight once.

    Without --rename and --dtype, weights keep their names in torch and their dtypes. A directory of
    safetensors files has the file names and the index that Hugging Face uses. An export as pt or
    dcp of more than 256 MiB needs disk space for two copies while it runs.
    """
    *step, last = step_and_out
    if len(step) > 1:
        raise UsageError(f"export: expected [STEP] OUT, found {len(step_and_out)} arguments")
    out = output_path(last)
    if format is None:
        format = "pt" if out.suffix in _PICKLED else "safetensors"
    _require_consistent(out, format, max_shard_size, dtype, with_optimizer)
    num_bytes = None
    if max_shard_size is not None:
        num_bytes = parsed_size(max_shard_size, "export: --max-shard-size")
    try:
        form = FolderForm(
            format=cast(Format, format) if format in _FOLDERS else "safetensors",
            dtype=dtype,
            config=None if config is None else local_path(config),
            max_shard_bytes=num_bytes,
            at=at,
            include=include,
            exclude=exclude,
            rename=dict(text.partition("=")[::2] for text in rename or ()),
        )
    except ValueError as error:
        raise UsageError(f"export: --{error}") from error  # it begins with an argument's name
    stored = StoredStep(chosen(directory, step[0] if step else None)[1])
    weights = form.weights_of(stored)
    has_config = None  # only folders for transformers can lack a config
    paths: Sequence[Path] = [out]
    leaves: Sequence[StoredLeaf] = list(weights.leaves.values())
    if format in _FOR_TORCH:
        leaves = [*leaves, *_write_for_torch(stored, weights, out, format, with_optimizer)]
    else:
        texts = form.texts_of(stored)
        has_config = None if texts is None else texts.has_config or format == "peft"
        total = sum(leaf.nbytes for leaf in leaves)
        with about(stored.committed), progress.bar("writing", lambda: total) as on_bytes:
            paths, leaves = form.write(stored, weights, texts, out, on_bytes)
    number, num_bytes = stored.committed.step, sum(leaf.nbytes for leaf in leaves)
    if has_config is False:
        output.note(
            f"{paths[0].parent} will not load: step {number} stores no config of the model, and a "
            "folder without config.json is no model for transformers. Give a folder that has one "
            "with --config, or save it with the steps: attach a model of transformers"
        )
    if as_json:
        content = {
            "step": number,
            "files": [str(path) for path in paths],
            "num_tensors": len(leaves),
            "num_bytes": num_bytes,
            "ties": dict(weights.ties),
            "left_out": list(weights.left_out),
        }
        output.print_json(content if has_config is None else {**content, "has_config": has_config})
        return OK
    if weights.left_out:
        left_out = ", ".join(weights.left_out)
        output.note(f"left out, because they are not weights: {left_out}")
    tied = f", {counted(len(weights.ties), 'tied name')}" if weights.ties else ""
    output.print_line(
        f"step {number}: {counted(len(leaves), 'tensor')}{tied}, {output.size(num_bytes)}, in "
        f"{', '.join(map(str, paths))}"
    )
    return OK


def _require_consistent(
    out: Path, format: str, size: str | None, dtype: Dtype | None, with_optimizer: bool
) -> None:
    """Raises UsageError if the format contradicts the name of the output, or a given option."""
    is_file = out.suffix in (".safetensors", *_PICKLED)
    if format == "safetensors" and out.suffix in _PICKLED:
        raise UsageError(
            f"export: {out}: expected a directory, or a name that ends in .safetensors, for "
            "--format safetensors"
        )
    if size is not None and (format not in ("safetensors", "hf") or is_file):
        raise UsageError(
            "export: --max-shard-size needs the format safetensors or hf, and a directory as "
            "OUT; omit --max-shard-size, or give --format safetensors and the name of a directory"
        )
    if format == "pt" and (out.is_dir() or out.suffix == ".safetensors"):
        raise UsageError(
            f"export: {out}: expected the name of a file for --format pt, found a directory or "
            "a name that ends in .safetensors; give a name such as model.pt"
        )
    if format in ("dcp", *_FOLDERS) and is_file:
        raise UsageError(
            f"export: {out}: expected the name of a directory for --format {format}, found the "
            f"name of a {out.suffix} file; give a name without this suffix"
        )
    if with_optimizer and format not in _FOR_TORCH:
        raise UsageError(
            "export: --optimizer needs --format pt or dcp; with safetensors, --at optimizer "
            "writes the moments to a separate file"
        )
    if dtype is not None and format in _FOR_TORCH:
        raise UsageError("export: --dtype needs --format safetensors, hf or peft")


def import_(
    weights: Annotated[
        str,
        typer.Argument(
            metavar="FROM",
            help="A .safetensors file; a directory of such files, or its index; a file of "
            "torch.save; or a directory of torch's DCP.",
        ),
    ],
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The new run's directory.")],
    tie: Annotated[
        list[str] | None,
        typer.Option(metavar="ALIAS=NAME", help="A tied weight's other name; may be repeated."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="torch.save, DCP: keys of the weights, if not model."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="DCP: take the optimizer too, which is of this class: AdamW."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Writes weights of another program as step 0 of a new run, whose attach then restores step 0.

    All other attached objects start anew; the optimizer too, unless --optimizer names its class.
    The command holds the directory's lease while it writes.
    """
    from torchax_ckpt.formats.dcp import is_dcp, open_optimizer
    from torchax_ckpt.formats.importing import (
        ImportedOptimizer,
        import_weights,
        is_known,
        open_files,
    )

    for text in tie or ():
        if not all(text.partition("=")):
            raise UsageError(f"import: --tie: expected ALIAS=NAME, found {text!r}")
    tied = dict(text.partition("=")[::2] for text in tie or ())
    require_no_step(directory)
    source, run = local_path(weights), run_to_write(directory)
    if not is_known(source):
        found = "a directory without them" if source.is_dir() else "no such file or directory"
        raise UsageError(
            f"{source}: expected files of safetensors, torch.save or torch's DCP, found {found}"
        )
    opened = open_files(source, at)
    moments = None
    if optimizer is not None:
        if not is_dcp(source):
            raise UsageError(f"import: --optimizer: {source} is not a directory of DCP")
        moments = ImportedOptimizer(optimizer, *open_optimizer(source, "optimizer"))
    try:
        assets = assets_of(source if source.is_dir() else source.parent)
    except DirectoryError as error:  # the weights can be imported all the same
        output.note(f"imported without the model's config and tokenizer: {error}")
        assets = None
    committed = import_weights(opened, run.path, ties=tied, assets=assets, optimizer=moments)
    num_bytes = sum(tensor.nbytes for tensor in opened.tensors.values())
    if as_json:
        output.print_json(
            {
                "step": committed.step,
                "path": str(committed.path),
                "files": [str(path) for path in opened.paths],
                "num_tensors": len(opened.tensors),
                "num_bytes": num_bytes,
                "ties": {**opened.ties, **tied},
            }
        )
    else:
        number = counted(len(opened.tensors), "tensor")
        output.print_line(
            f"step {committed.step} in {committed.path}: {number}, {output.size(num_bytes)}"
        )
    return OK


def _write_for_torch(
    stored: StoredStep, weights: Weights, out: Path, format: str, with_optimizer: bool
) -> Sequence[StoredLeaf]:
    """Writes weights with ``torch.save`` or DCP; returns the optimizers' leaves, if wanted."""
    from torchax_ckpt.formats.optimizer_state import OPTIMIZER, optimizers_of, state_dict_of
    from torchax_ckpt.formats.state_dict import (
        named_weights,
        read_tensors,
        room_for,
        save_dcp,
        save_torch_file,
    )

    require_new(out)  # before the command reads the step, which can take long
    optimizers = optimizers_of(stored) if with_optimizer else {}
    more = [stored.leaves[leaf["array"]] for n in optimizers.values() for leaf in array_nodes(n)]
    leaves = [*weights.leaves.values(), *more]
    with about(stored.committed), room_for(leaves, out.parent, stored.options) as allocate:
        tensors = read_tensors(stored, leaves, allocate)
        state: dict[str, Any] = {"model": named_weights(weights, tensors)}
        if with_optimizer:
            # DCP's readers expect parameters by name.
            state_dicts = {
                name: state_dict_of(
                    node, OPTIMIZER, lambda leaf: tensors[leaf["array"]], by_name=format == "dcp"
                )
                for name, node in optimizers.items()
            }
            state[OPTIMIZER] = state_dicts.get("", state_dicts)
        if format == "dcp":
            save_dcp(state, out)
        else:
            save_torch_file(state if with_optimizer else state["model"], out)
    return more
