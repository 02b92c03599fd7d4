"""The commands ``export`` and ``import``."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.quantities import parsed_size
from torchax_ckpt.cli.step_arguments import existing, step_named
from torchax_ckpt.errors import DirectoryError, MismatchError, SelectionError
from torchax_ckpt.formats.huggingface.model_folder import FolderFiles, assets_of
from torchax_ckpt.formats.weights import Weights
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.publishing.folder_form import Dtype, FolderForm, Format
from torchax_ckpt.runtime import progress
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep, about

_PICKLED = (".pt", ".pth", ".bin")  # suffixes of torch.save's files
_FOLDERS, _FOR_TORCH = ("hf", "peft"), ("pt", "dcp")


@dataclasses.dataclass(frozen=True)
class Exported:
    """The arguments of ``torchax-ckpt export`` that say what is written and how.

    Attributes:
      format: "safetensors", "hf", "peft", "pt" or "dcp"; None to choose by the name of ``out``.
      max_shard_size: largest total size of the tensors in one file, as text.
      dtype: the dtype to cast floating-point weights to: "bf16", "fp16", "fp32".
      with_optimizer: whether to write the optimizers too.
      config: a folder with ``config.json`` and other text files of the model.
      at: key path of the weights in the step.
      include, exclude: patterns of the names to write.
      rename: texts of the form ``OLD=NEW``.
      max_bytes: bound on array data in memory.
      command: the command's name, for messages.
    """

    format: str | None = None
    max_shard_size: str | None = None
    dtype: str | None = None
    with_optimizer: bool = False
    config: Path | None = None
    at: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    max_bytes: int | None = None
    command: str = "export"

    def form(self) -> FolderForm:
        """Returns what is written of a step, if ``format`` is not one of torch's own.

        Raises:
          UsageError: an argument is invalid.
        """
        is_folder = self.format in _FOLDERS
        size = self.max_shard_size
        try:
            return FolderForm(
                format=cast(Format, self.format) if is_folder else "safetensors",
                dtype=cast(Dtype | None, self.dtype),
                config=self.config,
                max_shard_bytes=None
                if size is None
                else parsed_size(size, f"{self.command}: --max-shard-size"),
                at=self.at,
                include=self.include,
                exclude=self.exclude,
                rename=dict(text.partition("=")[::2] for text in self.rename),
                max_host_bytes=self.max_bytes,
            )
        except ValueError as error:
            raise UsageError(f"{self.command}: {in_options(str(error))}") from error


_OPTIONS = {
    "max_shard_bytes": "max-shard-size",
    "max_host_bytes": "max-bytes",
    **{
        name: name
        for name in ("at", "config", "dtype", "exclude", "format", "include", "rename")
    },
}  # fmt: skip
# "at: ..." or "(config=)" in a sentence, but no part of a tensor's name or of an option.
_ARGUMENT = re.compile(rf"(?<![\w./%-])({'|'.join(_OPTIONS)})(?:=(?!\w)|(?=: ))")


def in_options(message: str) -> str:
    """Returns a message about arguments in Python as one about the options of a command."""
    return _ARGUMENT.sub(lambda found: f"--{_OPTIONS[found[1]]}", message)


@dataclasses.dataclass(frozen=True)
class Written:
    """What ``write`` wrote.

    Attributes:
      paths: the files, or the one folder or step.
      leaves: the leaves in them.
      weights: the weights, by torch's names.
      has_config: whether a folder says what the model is; None for formats without such folders.
    """

    paths: Sequence[os.PathLike[str]]
    leaves: Sequence[StoredLeaf]
    weights: Weights
    has_config: bool | None

    @property
    def num_bytes(self) -> int:
        """The size of the leaves in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def as_json(self) -> dict[str, Any]:
        """Returns the content as JSON."""
        return {
            "files": [str(path) for path in self.paths],
            "num_tensors": len(self.leaves),
            "num_bytes": self.num_bytes,
            "ties": dict(self.weights.ties),
            "left_out": list(self.weights.left_out),
            **({} if self.has_config is None else {"has_config": self.has_config}),
        }

    def print(self, what: str) -> None:
        """Prints what was written, and what not."""
        if self.weights.left_out:
            left_out = ", ".join(self.weights.left_out)
            output.note(f"left out, because they are not weights: {left_out}")
        tied = f", {len(self.weights.ties)} tied names" if self.weights.ties else ""
        output.print_line(
            f"{what}: {len(self.leaves)} tensors{tied}, {output.size(self.num_bytes)}, in "
            f"{', '.join(str(path) for path in self.paths)}"
        )


def export(directory: str, step: str | None, out: Path, wanted: Exported, *, as_json: bool) -> int:
    """Runs ``torchax-ckpt export``; returns the exit code."""
    wanted = settled(out, wanted)
    options = CheckpointOptions(max_host_bytes=wanted.max_bytes)
    stored = StoredStep(step_named(existing(directory), step), options)
    written = write(stored, chosen_weights(stored, wanted), out, wanted)
    if as_json:
        output.print_json({"step": stored.committed.step, **written.as_json()})
    else:
        written.print(f"step {stored.committed.step}")
    return OK


def settled(out: Path, wanted: Exported) -> Exported:
    """Returns the arguments with the format that ``out`` implies.

    Raises:
      UsageError: the arguments contradict each other, or ``out`` is a URL.
    """
    require_local(out)
    if wanted.format is None:
        wanted = dataclasses.replace(
            wanted, format="pt" if out.suffix in _PICKLED else "safetensors"
        )
    _require_consistent(out, wanted)
    wanted.form()
    return wanted


def chosen_weights(stored: StoredStep, wanted: Exported) -> Weights:
    """Returns the weights of a step that the arguments choose, under the names that they give.

    Raises:
      UsageError: there are no weights where the arguments say, or a pattern matches none.
    """
    try:
        return wanted.form().weights_of(stored)
    except MismatchError as error:
        raise UsageError(f"{wanted.command}: {error} with --at") from error
    except SelectionError as error:
        raise UsageError(f"{wanted.command}: {error}") from error


def write(stored: StoredStep, weights: Weights, out: Path, wanted: Exported) -> Written:
    """Writes weights to files of the wanted format, which ``settled`` has determined."""
    has_config = None
    paths: Sequence[os.PathLike[str]] = [out]
    leaves: Sequence[StoredLeaf] = list(weights.leaves.values())
    if wanted.format in _FOR_TORCH:
        leaves = [*leaves, *_write_for_torch(stored, weights, out, wanted)]
    else:
        form = wanted.form()
        texts = form.texts_of(stored)
        has_config = None if texts is None else texts.has_config or wanted.format == "peft"
        paths, leaves = _write_files(stored, weights, texts, out, form, wanted.command)
    if has_config is False:
        output.note(
            f"{out} will not load: step {stored.committed.step} stores no config of the model, and "
            "a folder without config.json is no model for transformers. Give a folder that has one "
            "with --config, or save it with the steps: attach a model of transformers"
        )
    return Written(paths, leaves, weights, has_config)


def _require_consistent(out: Path, wanted: Exported) -> None:
    format, command = wanted.format, wanted.command
    is_file = out.suffix in (".safetensors", *_PICKLED)
    if format == "safetensors" and out.suffix in _PICKLED:
        raise UsageError(
            f"{command}: {out}: expected a directory, or a name that ends in .safetensors, for "
            "--format safetensors"
        )
    if wanted.max_shard_size is not None and (format not in ("safetensors", "hf") or is_file):
        raise UsageError(
            f"{command}: --max-shard-size needs the format safetensors or hf, and a directory as "
            "OUT; omit --max-shard-size, or give --format safetensors and the name of a directory"
        )
    if format == "pt" and (out.is_dir() or out.suffix == ".safetensors"):
        raise UsageError(
            f"{command}: {out}: expected the name of a file for --format pt, found a directory or "
            "a name that ends in .safetensors; give a name such as model.pt"
        )
    if format in ("dcp", *_FOLDERS) and is_file:
        raise UsageError(
            f"{command}: {out}: expected the name of a directory for --format {format}, found the "
            f"name of a {out.suffix} file; give a name without this suffix"
        )
    if wanted.with_optimizer and format not in _FOR_TORCH:
        raise UsageError(
            f"{command}: --optimizer needs --format pt or dcp; with safetensors, --at optimizer "
            "writes the moments to a separate file"
        )
    if wanted.dtype is not None and format in _FOR_TORCH:
        raise UsageError(f"{command}: --dtype needs --format safetensors, hf or peft")
    if wanted.config is not None and format not in _FOLDERS:
        raise UsageError(f"{command}: --config needs --format hf or peft")


def import_(
    source: Path, directory: str, ties: Sequence[str], at: str | None, *, as_json: bool
) -> int:
    """Runs ``torchax-ckpt import``; returns the exit code."""
    from torchax_ckpt.formats.importing import import_weights, parsed_ties
    from torchax_ckpt.formats.opening import open_files

    try:
        tied = parsed_ties(ties)
    except ValueError as error:
        raise UsageError(f"import: --tie: {error}") from None
    require_local(source)
    if not source.exists():
        raise UsageError(f"{source}: no such file or directory")
    try:
        opened = open_files(source, at)
    except (MismatchError, SelectionError) as error:
        raise UsageError(f"import: {error}") from error
    try:
        assets = assets_of(source if source.is_dir() else source.parent)
    except DirectoryError as error:  # the weights can be imported all the same
        output.note(f"imported without the model's config and tokenizer: {error}")
        assets = None
    committed = import_weights(opened, directory, ties=tied, assets=assets)
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
        output.print_line(
            f"step {committed.step} in {committed.path}: {len(opened.tensors)} tensors, "
            f"{output.size(num_bytes)}"
        )
    return OK


def _write_files(
    stored: StoredStep,
    weights: Weights,
    texts: FolderFiles | None,
    out: Path,
    form: FolderForm,
    command: str,
) -> tuple[list[Path], list[StoredLeaf]]:
    """Writes safetensors, or a folder of transformers or PEFT; returns files and leaves in them."""
    total = sum(leaf.nbytes for leaf in weights.leaves.values())
    try:
        with progress.bar("writing", lambda: total) as on_bytes:
            return form.write(stored, weights, texts, out, on_bytes)
    except MismatchError as error:
        raise UsageError(f"{command}: step {stored.committed.step}: {error}") from error


def _write_for_torch(
    stored: StoredStep,
    weights: Weights,
    out: Path,
    wanted: Exported,
) -> Sequence[StoredLeaf]:
    """Writes weights with ``torch.save``, or as a checkpoint of torch's DCP.

    torch writes all tensors in one call, so they are all read first: into memory or, if they exceed
    ``max_host_bytes``, into a temporary file on disk.

    Returns:
      The leaves of the optimizers; none unless they are wanted.
    """
    from torchax_ckpt.formats.state_dict import (
        named_weights,
        read_tensors,
        room_for,
        save_dcp,
        save_torch_file,
    )

    if out.exists():  # checked before the command reads the step, which can take long
        raise DirectoryError(f"{out}: exists already; nothing was written", path=out)
    optimizers = None
    if wanted.with_optimizer:
        from torchax_ckpt.formats.optimizer_state import optimizers_of

        try:
            optimizers = optimizers_of(stored)
        except MismatchError as error:
            raise UsageError(f"export: --optimizer: {error}") from error
    more = () if optimizers is None else optimizers.leaves
    leaves = [*weights.leaves.values(), *more]
    with about(stored.committed), room_for(leaves, out.parent, stored.options) as allocate:
        tensors = read_tensors(stored, leaves, allocate)
        state: dict[str, Any] = {"model": named_weights(weights, tensors)}
        if optimizers is not None:
            state["optimizer"] = optimizers.state_dicts(
                tensors.__getitem__, by_name=wanted.format == "dcp"
            )
        if wanted.format == "dcp":
            save_dcp(state, out)
        else:
            save_torch_file(state if wanted.with_optimizer else state["model"], out)
    return more


def require_local(path: Path) -> None:
    """Raises UsageError if a path is a URL."""
    if path.parts and path.parts[0].endswith(":"):  # pathlib parses gs:// into the part gs:
        raise UsageError(
            f"{path}: expected a local path, found a URL; export and import read and write files "
            "of other programs locally only: give a path on this host"
        )
