"""Owns writing safetensors files: the header first, then tensors piece by piece, in any order.

The safetensors library writes a file from tensors that are all in memory; this writes one of any
size in the memory of a piece.

Source: https://huggingface.co/docs/safetensors, its format; and its ``save_model`` for how tied
weights are named in the metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from torchax_ckpt.errors import CheckpointError, DirectoryError, UnsupportedLeafError
from torchax_ckpt.formats.weights import Weights
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.stored import StoredLeaf, StoredStep

NAMES_OF_DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip

METADATA = "__metadata__"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ALIGNMENT = 8
_PARTIAL = ".partial"


@dataclasses.dataclass
class _File:
    """One file to write.

    Attributes:
      path: its final path.
      leaves: torch's name -> leaf.
      offsets: torch's name -> where its bytes begin in the file.
    """

    path: Path
    leaves: dict[str, StoredLeaf]
    offsets: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def partial(self) -> Path:
        """Its name until it is complete; another program's is another."""
        return self.path.with_name(f"{self.path.name}.{os.getpid()}{_PARTIAL}")

    def header(self, ties: Mapping[str, str]) -> bytes:
        """The bytes before the tensors; also decides where those are."""
        described: dict[str, object] = {
            # Read by Hugging Face's loaders; the rest as safetensors.torch.save_model has it.
            METADATA: {
                **{alias: name for alias, name in ties.items() if name in self.leaves},
                "format": "pt",
            }
        }
        end, begins = 0, {}
        # The widest first, so that all are aligned.
        order = sorted(self.leaves, key=lambda n: (-np.dtype(self.leaves[n].dtype).itemsize, n))
        for name in order:
            leaf = self.leaves[name]
            begins[name], end = end, end + leaf.nbytes
            described[name] = {
                "dtype": _dtype(leaf),
                "shape": list(leaf.shape),
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.offsets = {name: 8 + len(text) + begin for name, begin in begins.items()}
        return len(text).to_bytes(8, "little") + text


def export_safetensors(
    stored: StoredStep,
    weights: Weights,
    out: Path,
    options: CheckpointOptions,
    *,
    max_shard_bytes: int | None = None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:
    """Writes weights as Hugging Face does; tied ones once, under their first name.

    A file appears under its name when it is complete, and the index last.

    Args:
      stored: the step.
      weights: which leaves, and what they are called.
      out: a file, if it ends in ``.safetensors``; else a directory, made if it is not there, for
        ``model.safetensors``, or several files and ``model.safetensors.index.json``.
      options: memory bounds.
      max_shard_bytes: where a file ends and the next begins; None for one file.
      on_bytes: told of the bytes written so far.

    Returns:
      The files written.

    Raises:
      UnsupportedLeafError: a dtype that safetensors lacks.
      DirectoryError: one of the files is there already, or cannot be written.
      CorruptCheckpointError: the step is damaged.
    """
    files = _divide(weights, out, max_shard_bytes)
    index = out / INDEX if len(files) > 1 else None
    paths = [*(file.path for file in files), *([index] if index else [])]
    headers = [file.header(weights.ties) for file in files]
    with _removed_on_failure([*(file.partial for file in files), *paths], paths):
        for file, header in zip(files, headers, strict=True):
            _allocate(file, header)
        _fill(stored, files, options, on_bytes)
        for file in files:
            _sync(file.partial)
            file.partial.rename(file.path)
        if index:
            index.write_text(json.dumps(_index(files), indent=2) + "\n")
            _sync(index)
    return paths


def _dtype(leaf: StoredLeaf) -> str:
    if leaf.dtype not in NAMES_OF_DTYPES:
        raise UnsupportedLeafError(
            f"{leaf.name}: safetensors has no dtype {leaf.dtype}", key_path=leaf.name
        )
    return NAMES_OF_DTYPES[leaf.dtype]


def _divide(weights: Weights, out: Path, max_shard_bytes: int | None) -> list[_File]:
    if METADATA in weights.leaves:
        raise UnsupportedLeafError(f"safetensors has no tensor of the name {METADATA}")
    shards: list[dict[str, StoredLeaf]] = [{}]
    size = 0
    for name, leaf in weights.leaves.items():
        if max_shard_bytes is not None and shards[-1] and size + leaf.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = leaf
        size += leaf.nbytes
    if out.suffix == ".safetensors" and len(shards) == 1:
        return [_File(out, shards[0])]
    if len(shards) == 1:
        return [_File(out / SINGLE, shards[0])]
    return [
        _File(out / f"model-{i:05d}-of-{len(shards):05d}.safetensors", shard)
        for i, shard in enumerate(shards, 1)
    ]


def _index(files: Sequence[_File]) -> dict[str, object]:
    total = sum(leaf.nbytes for file in files for leaf in file.leaves.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: file.path.name for file in files for name in sorted(file.leaves)},
    }


def _allocate(file: _File, header: bytes) -> None:
    """Takes the room of the whole file: writing to a mapped file that lacks it kills a program."""
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with open(file.partial, "xb") as opened:
        opened.write(header)
        opened.flush()
        nbytes = sum(leaf.nbytes for leaf in file.leaves.values())
        if nbytes:
            os.posix_fallocate(opened.fileno(), len(header), nbytes)


def _fill(
    stored: StoredStep,
    files: Sequence[_File],
    options: CheckpointOptions,
    on_bytes: Callable[[int], None],
) -> None:
    homes = {
        leaf.name: (file.partial, file.offsets[name])
        for file in files
        for name, leaf in file.leaves.items()
    }
    for name, index, content in stored.stream(homes, options):
        path, offset = homes[name]
        shape = stored.leaves[name].shape
        mapped = np.memmap(path, content.dtype, "r+", offset, shape)
        mapped[index] = content
        del mapped  # what is written does not count as this program's memory any longer
        on_bytes(math.prod(content.shape) * content.itemsize)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _removed_on_failure(made: Iterable[Path], wanted: Iterable[Path]) -> Iterator[None]:
    """Refuses to overwrite; leaves nothing behind of what fails."""
    for path in wanted:
        if path.exists():
            raise DirectoryError(f"{path}: is there already; nothing was written", path=path)
    try:
        yield
    except BaseException as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise DirectoryError(f"cannot write the export: {error}") from error
        raise
