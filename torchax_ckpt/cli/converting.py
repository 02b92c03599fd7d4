"""Owns the commands ``export`` and ``import``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torchax_ckpt import progress
from torchax_ckpt.cli import output
from torchax_ckpt.cli.outcome import OK, UsageError
from torchax_ckpt.cli.steps import existing
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.formats.weights import Weights, weights_at
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.stored import StoredStep

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def export(
    directory: str,
    step: int,
    out: Path,
    *,
    format: str,
    max_shard_size: str | None,
    at: str | None,
    max_bytes: int | None,
    as_json: bool,
) -> int:
    """``torchax-ckpt export``."""
    _require_local(out)
    max_shard_bytes = None if max_shard_size is None else parsed_size(max_shard_size)
    is_file = out.suffix in (".safetensors", ".pt", ".pth", ".bin")
    if max_shard_bytes is not None and (format == "pt" or is_file):
        raise UsageError("export: --max-shard-size is for safetensors, in a directory")
    if format == "pt" and (out.is_dir() or out.suffix == ".safetensors"):
        raise UsageError(f"export: {out}: expected the name of a file for --format pt")
    stored = StoredStep(existing(directory).find(step))
    try:
        weights = weights_at(stored, at)
    except MismatchError as error:
        raise UsageError(f"export: {error} with --at") from error
    options = CheckpointOptions(max_host_bytes=max_bytes)
    paths = _write(stored, weights, out, format, options, max_shard_bytes)
    num_bytes = sum(leaf.nbytes for leaf in weights.leaves.values())
    if as_json:
        output.print_json(
            {
                "step": step,
                "files": [str(path) for path in paths],
                "num_tensors": len(weights.leaves),
                "num_bytes": num_bytes,
                "ties": dict(weights.ties),
                "left_out": list(weights.left_out),
            }
        )
        return OK
    if weights.left_out:
        output.note(f"left out, being no weights: {', '.join(weights.left_out)}")
    tied = f", {len(weights.ties)} tied names" if weights.ties else ""
    output.print_line(
        f"step {step}: {len(weights.leaves)} tensors{tied}, {output.size(num_bytes)}, in "
        f"{', '.join(str(path) for path in paths)}"
    )
    return OK


def import_(source: Path, directory: str, ties: Sequence[str], *, as_json: bool) -> int:
    """``torchax-ckpt import``."""
    from torchax_ckpt.formats.importing import import_weights, open_safetensors, parsed_ties

    try:
        tied = parsed_ties(ties)
    except ValueError as error:
        raise UsageError(f"import: --tie: {error}") from None
    _require_local(source)
    if not source.exists():
        raise UsageError(f"{source}: no such file or directory")
    opened = open_safetensors(source)
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


def _write(
    stored: StoredStep,
    weights: Weights,
    out: Path,
    format: str,
    options: CheckpointOptions,
    max_shard_bytes: int | None,
) -> list[Path]:
    if format == "pt":
        from torchax_ckpt.formats.state_dict import read_state_dict, save_torch_file

        save_torch_file(read_state_dict(stored, weights, options), out)
        return [out]
    from torchax_ckpt.formats.safetensors_files import export_safetensors

    total = sum(leaf.nbytes for leaf in weights.leaves.values())
    with progress.bar("writing", lambda: total) as on_bytes:
        return export_safetensors(
            stored, weights, out, options, max_shard_bytes=max_shard_bytes, on_bytes=on_bytes
        )


def _require_local(path: Path) -> None:
    if path.parts and path.parts[0].endswith(":"):  # what pathlib makes of gs://
        raise UsageError(f"{path}: files of other programs are read and written locally only")


def parsed_size(text: str) -> int:
    """Bytes, of ``5GB``, ``500 MiB`` or a number.

    Raises:
      UsageError: it is no size, or none that anything fits into.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"expected a size such as 5GB or 500MiB, found {text!r}")
    number, prefix, binary = match.groups()
    nbytes = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
    if nbytes < 1:
        raise UsageError(f"expected a size of at least one byte, found {text!r}")
    return nbytes
