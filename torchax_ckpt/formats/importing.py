"""Owns making the first step of a run from safetensors: weights that training then starts from.

The tensors are mapped, not read, so that a model of any size is imported; the safetensors library
checks every file first.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, UnsupportedLeafError
from torchax_ckpt.formats.safetensors_files import INDEX, METADATA, NAMES_OF_DTYPES
from torchax_ckpt.formats.weights import MODEL
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import IMPORTED, Manifest, installed_versions
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.snapshot import Planner, execute
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage import digests
from torchax_ckpt.storage.compression import Compression
from torchax_ckpt.storage.directory import CommittedStep, StepDirectory

_DTYPES = {theirs: ours for ours, theirs in NAMES_OF_DTYPES.items()}
# What .to("jax") makes of 64-bit integers, unless JAX is told to keep them.
_NARROW = {"int64": "int32", "uint64": "uint32"}


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights in safetensors files.

    Attributes:
      tensors: torch's name -> the mapped tensor.
      ties: another name of a tied weight -> its name, where the files say so.
      paths: the files.
    """

    tensors: Mapping[str, np.ndarray]
    ties: Mapping[str, str]
    paths: tuple[Path, ...]


def open_safetensors(path: Path) -> Source:
    """Opens a file, or a directory or index as Hugging Face writes them; reads no tensor yet.

    Raises:
      DirectoryError: there is none.
      CorruptCheckpointError: a file is damaged, or the index does not fit the files.
      UnsupportedLeafError: a tensor has a dtype that cannot be stored.
    """
    files, expected = _files(path)
    tensors: dict[str, np.ndarray] = {}
    ties: dict[str, str] = {}
    for file in files:
        found, metadata = _open(file)
        if twice := found.keys() & tensors.keys():
            raise CorruptCheckpointError(f"{file}: {min(twice)} is in two files", path=file)
        if expected is not None and (missing := expected[file.name] - found.keys()):
            raise CorruptCheckpointError(
                f"{file}: {min(missing)} is in the index, but not in the file", path=file
            )
        tensors |= found
        ties |= metadata
    # As safetensors.torch.save_model notes them; other metadata is for people.
    known = {a: n for a, n in ties.items() if n in tensors and a not in tensors}
    return Source(tensors, known, tuple(files))


def import_weights(
    source: Source,
    directory: str,
    *,
    step: int = 0,
    ties: Mapping[str, str] | None = None,
    options: CheckpointOptions | None = None,
) -> CommittedStep:
    """Writes the weights as a step from which ``attach`` goes on, in a directory that has none.

    64-bit integers are stored as 32-bit ones where their values fit, as they are on devices.

    Args:
      source: the weights.
      directory: of the new run.
      step: the number of the step.
      ties: another name of a tied weight -> its name in the files; joins what the files say.
      options: memory bounds, compression, layout.

    Raises:
      DirectoryError: the directory has steps already, or cannot be written.
      LeaseError: another program writes to it.
      UnsupportedLeafError: a tie to what is not there, or a dtype that devices narrow.
    """
    options = options or CheckpointOptions()
    tied = {**source.ties, **(ties or {})}
    for alias, name in tied.items():
        if name not in source.tensors or alias in source.tensors:
            raise UnsupportedLeafError(
                f"{alias}: cannot be tied to {name}: expected files that hold {name} and not "
                f"{alias}"
            )
    arrays = {
        names.join((MODEL, name)): _as_on_devices(name, array)
        for name, array in source.tensors.items()
    }
    plan = Planner(options.layout)(list(arrays), list(arrays.values()))
    stored = execute(plan, arrays, copy=False)
    taken = {
        n: digests.take(a, digests.shards(a), is_stack=n in plan.stacks) for n, a in stored.items()
    }
    document = {
        MODEL: {
            "dict": [[name, _node(names.join((MODEL, name)), arrays)] for name in source.tensors],
            "ties": [[alias, name] for alias, name in tied.items()],
            "extra_state": [],
        },
        IMPORTED: [path.name for path in source.paths],
    }
    manifest = Manifest(document, plan, installed_versions(), taken)
    return _write(StepDirectory(directory), step, manifest, stored, options)


def _write(
    run: StepDirectory,
    step: int,
    manifest: Manifest,
    stored: Mapping[str, Any],
    options: CheckpointOptions,
) -> CommittedStep:
    _require_empty(run)
    try:
        run.claim()
        _require_empty(run)  # now that nobody else writes to it
        run.recover()
        path = run.path_for(step)
        storage.write_step(
            path,
            stored,
            manifest.to_json,
            {"metrics": {}, "abandons": []},
            options,
            Compression(bool(options.compression)),
            before_commit=run.fence,
        )
        return run.commit(step, path)
    finally:
        run.release()


def _require_empty(run: StepDirectory) -> None:
    if there := run.steps():
        raise DirectoryError(
            f"{run.path}: expected a directory without checkpoints, found step {there[-1].step}. "
            "Import into a directory of its own.",
            path=run.path,
        )


def _node(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    array = arrays[name]
    return {
        "array": name,
        "kind": "torchax",
        "dtype": array.dtype.name,
        "shape": list(array.shape),
    }


def _as_on_devices(name: str, array: np.ndarray) -> np.ndarray:
    """The array as ``.to("jax")`` would have it; raises where that would change a value."""
    if array.dtype.name == "float64":
        raise UnsupportedLeafError(
            f"{name}: is float64, which devices narrow: convert it to float32 first"
        )
    if array.dtype.name not in _NARROW:
        return array
    narrow = array.astype(_NARROW[array.dtype.name])
    if not np.array_equal(narrow, array):
        raise UnsupportedLeafError(
            f"{name}: is {array.dtype.name} with values beyond {narrow.dtype.name}, which devices "
            "have in its place"
        )
    return narrow


def _files(path: Path) -> tuple[list[Path], dict[str, set[str]] | None]:
    """The files of a model and, where there is an index, which names each of them has."""
    index = path / INDEX if path.is_dir() else path
    if path.is_dir() and not index.exists():
        path = path / "model.safetensors"
    if index.name.endswith(".index.json") and index.exists():
        expected: dict[str, set[str]] = {}
        try:
            for name, file in json.loads(index.read_text())["weight_map"].items():
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is no name of a file")
                expected.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{index}: no index: {error!r:.200}", path=index) from None
        return [index.parent / file for file in sorted(expected)], expected
    if not path.is_file():
        raise DirectoryError(f"{path}: no such file", path=path)
    return [path], None


def _open(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of one file, mapped, and its metadata."""
    import safetensors

    try:
        with safetensors.safe_open(path, "np") as checked:  # offsets, sizes, the header's form
            metadata = checked.metadata() or {}
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path}: is in the index, and not there", path=path) from None
    except (safetensors.SafetensorError, ValueError) as error:
        raise CorruptCheckpointError(f"{path}: {error!s:.200}", path=path) from error
    tensors = {
        name: _mapped(path, name, entry, 8 + length)
        for name, entry in header.items()
        if name != METADATA
    }
    return tensors, dict(metadata)


def _mapped(path: Path, name: str, entry: Mapping[str, Any], begin: int) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise UnsupportedLeafError(f"{path}: {name}: dtype {entry['dtype']} cannot be stored")
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    mapped = np.memmap(path, dtype, "r", begin + entry["data_offsets"][0], shape)
    return mapped.view(np.ndarray)


def parsed_ties(texts: Iterable[str]) -> dict[str, str]:
    """``ALIAS=NAME`` as a mapping.

    Raises:
      ValueError: one is of another form.
    """
    ties = {}
    for text in texts:
        alias, separator, name = text.partition("=")
        if not (separator and alias and name):
            raise ValueError(f"expected ALIAS=NAME, found {text!r}")
        ties[alias] = name
    return ties
