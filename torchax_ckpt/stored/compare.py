"""Compares two stored steps: finds leaves and values that differ, or that one step lacks.

Values are the parts of the state that are not arrays. A few leaves are read at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import names, nodes
from torchax_ckpt.layout.batches import batches
from torchax_ckpt.storage.directory.committed_step import ASSETS
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep

What = Literal["only_in_a", "only_in_b", "form", "bits", "content"]

# The bytes of leaves to read together: a round trip for each small leaf would be slow.
_BATCH_BYTES = 64 << 20
# The elements to compare at a time, so that their widened copies stay smaller than the leaves.
_CHUNK_ELEMENTS = 1 << 20
# The tags of manifest nodes that hold pairs of a key and a node.
# The tags of numbers and texts, and of containers that have no keys.
_TAGS = {"int", "float", "bytes", "complex", "scalar", "tuple", "set", "frozenset"}
_PAIRS = ("dict", "OrderedDict", "Counter", "namedtuple", "pytree")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How one leaf, or one value that is not an array, differs between two steps.

    ``what`` is "only_in_a" or "only_in_b"; "form" if kind, dtype or shape differs; "content" if
    values differ; "bits" if equal values have different bits (-0.0 and 0.0, or two NaNs).
    ``num_elements`` differ in value, two NaNs being equal; ``num_nan`` of them are NaN in one step
    only, ``max_abs`` is of the others.
    """

    name: str
    what: What
    a: str | None = None
    b: str | None = None
    num_elements: int | None = None
    num_nan: int | None = None
    max_abs: float | int | None = None


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """All differences between two steps: of arrays, and of other values and assets, by name."""

    leaves: tuple[Difference, ...]
    values: tuple[Difference, ...]
    num_identical: int

    @property
    def is_identical(self) -> bool:
        """Whether all leaves and values that were compared are identical to the bit."""
        return not (self.leaves or self.values)


def compare(
    a: StoredStep,
    b: StoredStep,
    *,
    is_wanted: Callable[[str], bool] = lambda name: True,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> StepComparison:
    """Compares two steps by their leaves, even if they store the leaves in different stacks.

    ``is_wanted`` says which leaves and values to compare; ``on_bytes`` is called with the bytes
    just compared, of one step only. Raises as ``StoredStep.read`` does.
    """
    found: list[Difference] = []
    both: list[StoredLeaf] = []
    for name in sorted({*a.leaves, *b.leaves}):
        if not is_wanted(name):
            continue
        in_a, in_b = a.leaves.get(name), b.leaves.get(name)
        if in_a is None or in_b is None:
            what: What = "only_in_a" if in_a else "only_in_b"
            found.append(Difference(name, what, _form(in_a), _form(in_b)))
        elif _form(in_a) != _form(in_b):
            found.append(Difference(name, "form", _form(in_a), _form(in_b)))
        else:
            both.append(in_a)
    num_identical = 0
    # Leaves of one stack follow each other, because a read of one of them reads the whole stack.
    both.sort(key=lambda leaf: (leaf.stack or leaf.name, leaf.name))
    for batch in batches(both, lambda leaf: leaf.nbytes, _BATCH_BYTES):
        names = [leaf.name for leaf in batch]
        left, right = a.read(names), b.read(names)
        for name in names:
            difference = _difference(name, left.pop(name), right.pop(name))
            if difference is None:
                num_identical += 1
            else:
                found.append(difference)
        on_bytes(sum(leaf.nbytes for leaf in batch))
    values = tuple(
        difference for difference in (*_values(a, b), *_assets(a, b)) if is_wanted(difference.name)
    )
    return StepComparison(tuple(sorted(found, key=lambda d: d.name)), values, num_identical)


def _form(leaf: StoredLeaf | None) -> str | None:
    return None if leaf is None else f"{leaf.kind} {leaf.dtype}{list(leaf.shape)}"


def _difference(name: str, a: np.ndarray, b: np.ndarray) -> Difference | None:
    """Returns how arrays of equal dtype and shape differ; None if identical to the bit."""
    a, b = a.reshape(-1), b.reshape(-1)
    is_identical, num_elements, num_nan = True, 0, 0
    largest: list[float | int] = []
    for start in range(0, a.size, _CHUNK_ELEMENTS):
        left, right = (part[start : start + _CHUNK_ELEMENTS] for part in (a, b))
        if left.tobytes() == right.tobytes():
            continue
        is_identical = False
        left, right = _widened(left), _widened(right)
        left_nan, right_nan = left != left, right != right
        differs = (left != right) & ~(left_nan & right_nan)
        num_elements += int(differs.sum())
        numbers = differs & ~left_nan & ~right_nan
        num_nan += int((differs & ~numbers).sum())
        if numbers.any():
            largest.append(_largest(left[numbers], right[numbers]))
    if is_identical:
        return None
    if num_elements == 0:
        return Difference(name, "bits", num_elements=0, num_nan=0)
    return Difference(
        name,
        "content",
        num_elements=num_elements,
        num_nan=num_nan,
        max_abs=max(largest, default=None),
    )


def _widened(array: np.ndarray) -> np.ndarray:
    """Converts an array to a dtype in which numpy can subtract; no value changes."""
    dtype = array.dtype
    if dtype.kind in "iufc" and dtype.itemsize >= 8:
        return array
    if dtype.kind == "c":
        return array.astype(np.complex128)
    if dtype.kind == "b" or dtype.kind in "iu" or dtype.name == "int4":
        return array.astype(np.int64)
    return array.astype(np.float64)


def _largest(a: np.ndarray, b: np.ndarray) -> float | int:
    """Returns the largest absolute difference of two arrays; for integers, the exact number."""
    with np.errstate(over="ignore", invalid="ignore"):
        if a.dtype.kind not in "iu":
            return float(np.abs(a - b).max())
        # Computed modulo 2^64, which gives the exact difference of two 64-bit integers.
        low, high = (f(a, b).astype(np.uint64) for f in (np.minimum, np.maximum))
        return int((high - low).max())


_ABSENT = object()


def plain_values(step: StoredStep) -> dict[str, Any]:
    """Returns name -> value of what a step holds besides arrays: numbers, strings and the like.

    A list without arrays and dicts, such as the state of a random generator, is one value.
    """
    try:
        return {names.join(path): value for path, value in _plain(step.manifest.document, ())}
    except RecursionError:
        raise step.committed.error(
            CorruptCheckpointError,
            "the manifest nests deeper than any valid manifest, so the step is damaged. Use "
            "another step",
        ) from None


def _values(a: StoredStep, b: StoredStep) -> Iterator[Difference]:
    """Yields the differences between the values of two steps that are not arrays."""
    left, right = plain_values(a), plain_values(b)
    for name in sorted({*left, *right}):
        in_a, in_b = left.get(name, _ABSENT), right.get(name, _ABSENT)
        if _bits(in_a) != _bits(in_b):
            what: What = (
                "only_in_b" if in_a is _ABSENT else "only_in_a" if in_b is _ABSENT else "content"
            )
            left_text, right_text = (None if v is _ABSENT else repr(v) for v in (in_a, in_b))
            yield Difference(name, what, left_text, right_text)


def _bits(value: Any) -> Any:
    """Returns what is equal for values of one type and equal bits only."""
    if isinstance(value, list):
        return [_bits(each) for each in value]
    # Python treats True and 1 as equal, -0.0 and 0.0 too, and a NaN and itself as different.
    return type(value), struct.pack(">d", value) if isinstance(value, float) else value


def _assets(a: StoredStep, b: StoredStep) -> Iterator[Difference]:
    """Yields the assets that differ; reads none if the digests in the manifests are equal."""
    if a.manifest.assets == b.manifest.assets:
        return
    left, right = a.read_assets(), b.read_assets()
    for name in sorted({*left, *right}):
        in_a, in_b = left.get(name), right.get(name)
        if in_a != in_b:
            what: What = "only_in_b" if in_a is None else "only_in_a" if in_b is None else "content"
            a_size, b_size = (t if t is None else f"{len(t)} characters" for t in (in_a, in_b))
            yield Difference(f"{ASSETS}/{name}", what, a_size, b_size)


def _key_text(node: Any) -> str:
    """Returns the text of a key; that of its JSON if it is damaged."""
    try:
        return names.key_texts([nodes.key_of(node)])[0]
    except CorruptCheckpointError:
        return repr(node)


def _plain(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, value) for each value in a part of a manifest's JSON tree, except arrays."""
    if isinstance(node, dict):
        if "array" in node:
            return
        is_tagged = not node.keys().isdisjoint({*_TAGS, *_PAIRS})
        for tag, payload in node.items():
            if path and is_tagged and tag in ("type", "factory"):  # no value of the user's
                continue
            is_short = isinstance(payload, str) and len(payload) < 1000  # Python prints no more
            if tag in ("int", "float") and is_short:
                yield path, nodes.decode(node, lambda leaf: None)
            elif tag in _PAIRS and isinstance(payload, list):
                for pair in payload:
                    if isinstance(pair, list) and len(pair) == 2:
                        key = _key_text(pair[0])
                        yield from _plain(pair[1], (*path, key))
            else:
                # The tag of a container or a value is not a key that the user gave.
                is_key = not path or tag not in _TAGS
                yield from _plain(payload, (*path, tag) if is_key else path)
    elif isinstance(node, list):
        paths = [(*path, str(index)) for index in range(len(node))]
        found = [dict(_plain(*each)) for each in zip(node, paths, strict=True)]
        # An empty list has no value, as an empty dict has none.
        if found and all(v.keys() == {path} for v, path in zip(found, paths, strict=True)):
            yield path, [*itertools.chain(*(values.values() for values in found))]
        else:
            yield from itertools.chain(*(values.items() for values in found))
    else:
        yield path, node
