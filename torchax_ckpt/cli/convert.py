"""The commands ``export`` and ``import``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.errors import DirectoryError, MismatchError, SelectionError
from torchax_ckpt.formats.scratch import room_for
from torchax_ckpt.formats.weights import Weights, weights_at
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.runtime import progress
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep, about

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_PICKLED = (".pt", ".pth", ".bin")  # suffixes of torch.save's files
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def export(
    directory: str,
    step: int,
    out: Path,
    *,
    format: str | None,
    max_shard_size: str | None,
    with_optimizer: bool,
    at: str | None,
    max_bytes: int | None,
    as_json: bool,
) -> int:
    """Runs ``torchax-ckpt export``; returns the exit code."""
    _require_local(out)
    if format is None:
        format = "pt" if out.suffix in _PICKLED else "safetensors"
    max_shard_bytes = None if max_shard_size is None else parsed_size(max_shard_size)
    _require_consistent(out, format, is_cut=max_shard_bytes is not None, optimizer=with_optimizer)
    stored = StoredStep(existing(directory).find(step))
    options = CheckpointOptions(max_host_bytes=max_bytes)
    try:
        weights = weights_at(stored, at)
    except MismatchError as error:
        raise UsageError(f"export: {error} with --at") from error
    leaves = list(weights.leaves.values())
    if format == "safetensors":
        paths = _write_safetensors(stored, weights, out, options, max_shard_bytes)
    else:
        leaves += _write_for_torch(stored, weights, out, format, with_optimizer, options)
        paths = [out]
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    if as_json:
        output.print_json(
            {
                "step": step,
                "files": [str(path) for path in paths],
                "num_tensors": len(leaves),
                "num_bytes": num_bytes,
                "ties": dict(weights.ties),
                "left_out": list(weights.left_out),
            }
        )
        return OK
    if weights.left_out:
        output.note(f"left out, because they are not weights: {', '.join(weights.left_out)}")
    tied = f", {len(weights.ties)} tied names" if weights.ties else ""
    output.print_line(
        f"step {step}: {len(leaves)} tensors{tied}, {output.size(num_bytes)}, in "
        f"{', '.join(str(path) for path in paths)}"
    )
    return OK


def _require_consistent(out: Path, format: str, *, is_cut: bool, optimizer: bool) -> None:
    is_file = out.suffix in (".safetensors", *_PICKLED)
    if format == "safetensors" and out.suffix in _PICKLED:
        raise UsageError(
            f"export: {out}: expected a directory, or a name that ends in .safetensors, for "
            "--format safetensors"
        )
    if is_cut and (format != "safetensors" or is_file):
        raise UsageError(
            "export: --max-shard-size needs the format safetensors, and a directory as OUT; omit "
            "--max-shard-size, or give --format safetensors and the name of a directory"
        )
    if format == "pt" and (out.is_dir() or out.suffix == ".safetensors"):
        raise UsageError(
            f"export: {out}: expected the name of a file for --format pt, found a directory or a "
            "name that ends in .safetensors; give a name such as model.pt"
        )
    if format == "dcp" and is_file:
        raise UsageError(
            f"export: {out}: expected the name of a directory for --format dcp, found the name of "
            f"a {out.suffix} file; give a name without this suffix"
        )
    if optimizer and format == "safetensors":
        raise UsageError(
            "export: --optimizer needs --format pt or dcp; with safetensors, --at optimizer writes "
            "the moments to a separate file"
        )


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
    _require_local(source)
    if not source.exists():
        raise UsageError(f"{source}: no such file or directory")
    try:
        opened = open_files(source, at)
    except (MismatchError, SelectionError) as error:
        raise UsageError(f"import: {error}") from error
    committed = import_weights(opened, directory, ties=tied)
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


def _write_safetensors(
    stored: StoredStep,
    weights: Weights,
    out: Path,
    options: CheckpointOptions,
    max_shard_bytes: int | None,
) -> list[Path]:
    from torchax_ckpt.formats.safetensors_io import export_safetensors

    total = sum(leaf.nbytes for leaf in weights.leaves.values())
    with progress.bar("writing", lambda: total) as on_bytes:
        return export_safetensors(
            stored, weights, out, options, max_shard_bytes=max_shard_bytes, on_bytes=on_bytes
        )


def _write_for_torch(
    stored: StoredStep,
    weights: Weights,
    out: Path,
    format: str,
    with_optimizer: bool,
    options: CheckpointOptions,
) -> Sequence[StoredLeaf]:
    """Writes weights with ``torch.save``, or as a checkpoint of torch's DCP.

    torch writes all tensors in one call, so they are all read first: into memory or, if they exceed
    ``max_host_bytes``, into a temporary file on disk.

    Returns:
      The leaves of the optimizers; none without ``with_optimizer``.
    """
    from torchax_ckpt.formats.dcp import save_dcp
    from torchax_ckpt.formats.state_dict import named_weights, read_tensors, save_torch_file

    if out.exists():  # checked before the command reads the step, which can take long
        raise DirectoryError(f"{out}: exists already; nothing was written", path=out)
    optimizers = None
    if with_optimizer:
        from torchax_ckpt.formats.optimizer_state import optimizers_of

        try:
            optimizers = optimizers_of(stored)
        except MismatchError as error:
            raise UsageError(f"export: --optimizer: {error}") from error
    more = () if optimizers is None else optimizers.leaves
    leaves = [*weights.leaves.values(), *more]
    with about(stored.committed), room_for(leaves, out.parent, options) as allocate:
        tensors = read_tensors(stored, leaves, options, allocate)
        state: dict[str, Any] = {"model": named_weights(weights, tensors)}
        if optimizers is not None:
            state["optimizer"] = optimizers.state_dicts(
                tensors.__getitem__, by_name=format == "dcp"
            )
        if format == "dcp":
            save_dcp(state, out)
        else:
            save_torch_file(state if with_optimizer else state["model"], out)
    return more


def _require_local(path: Path) -> None:
    if path.parts and path.parts[0].endswith(":"):  # pathlib parses gs:// into the part gs:
        raise UsageError(
            f"{path}: expected a local path, found a URL; export and import read and write files "
            "of other programs locally only: give a path on this host"
        )


def parsed_size(text: str, option: str = "--size or --max-shard-size") -> int:
    """Parses a size such as ``5GB``, ``500 MiB`` or a plain number of bytes.

    Args:
      text: the size.
      option: the option that has this size, for the message of an error.

    Raises:
      UsageError: the text is not a size, or the size is below one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option}: expected a size such as 5GB or 500MiB, found {text!r}")
    number, prefix, binary = match.groups()
    nbytes = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
    if nbytes < 1:
        raise UsageError(f"{option}: expected a size of at least one byte, found {text!r}")
    return nbytes
