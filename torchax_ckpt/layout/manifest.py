"""Defines and checks manifests. The manifest of a step is JSON that describes its arrays.

A manifest has this form:

    {"format": "torchax_ckpt", "version": 1, "versions": {...}, "document": {component: node},
     "stacks": {stored name: [member names]}, "empty": [names],
     "digests": {stored name: {"block": [dims], "xxh3_64": base64}},
     "unchanged": {database: {"copy": 0 or 1, "processes": [indices],
                              "xxh3_128": {stored name: base64}}},
     "assets": seal, "attached": [components]}

For each block of a stored array, ``digests`` has one digest of 8 octets, little-endian; the digests
are in C order of the blocks. ``unchanged`` names the step's databases of frozen arrays, which later
steps may reuse, see ``layout/unchanged.py``; one that one process wrote alone lacks ``processes``.
``assets`` is the digest of the step's assets. ``attached`` names the components, and their
members, that were attached when functional state was saved in their place. A step that has none of
these lacks the key.

``document`` describes the whole state as a tree of nodes, in which each array node names one leaf.
``nodes.py`` defines the form of nodes and decodes them; ``state/pytree.py`` writes them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.metadata
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import names, unchanged
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.layout.storage_plan import MAX_RANK, Plan
from torchax_ckpt.layout.unchanged import Database

FORMAT = "torchax_ckpt"
# Specified in docs/format.md. A reader refuses versions newer than its own and reads older ones.
VERSION = 1

# A step that was imported from files of another format has this component. It has the weights of a
# model, and perhaps an optimizer; a restore of the step leaves other attached objects unchanged.
IMPORTED = "imported"

KINDS = frozenset({"torchax", "torch", "jax", "numpy", "numpy_scalar", "key"})
# The dtypes that TensorStore can store: numpy's without float128 and complex256, and most of
# ml_dtypes'.
STORABLE_DTYPES = frozenset(
    ["bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
     "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn",
     "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz",
     "float8_e8m0fnu"]
)  # fmt: skip

# How deep containers in a state may be nested. The state's JSON is nested three times as deep.
MAX_DEPTH = 100
# No machine has memory for more elements, and no size computed from so many elements overflows.
MAX_ELEMENTS = 2**56  # the product of all dims but those of length 0

Node = Any
"""One node of the document: JSON (None, bool, int, float, str, list, dict)."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a step's manifest: the state's description, the storage plan, the digests.

    Attributes:
      document: component (``model``, ``optimizer``, ...) -> its node.
      plan: where each leaf is stored.
      versions: library -> its version when the step was written. For people only: no code may
        depend on a version.
      digests: stored name -> the digests of the array's bytes.
      unchanged: name -> database of frozen arrays.
      assets: the digest of the step's assets; None if the step has no assets.
      attached: the components that were attached when functional state was saved, and their
        members (``model``, ``model/a``); None without functional state, and in steps of releases
        that did not record it.
    """

    document: Mapping[str, Node]
    plan: Plan
    versions: Mapping[str, str]
    digests: Mapping[str, Digests]
    unchanged: Mapping[str, Database] = dataclasses.field(default_factory=dict)
    assets: str | None = None
    attached: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as Python values that JSON can represent."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "versions": dict(self.versions),
            "document": dict(self.document),
            "stacks": dict(self.plan.stacks),
            "empty": sorted(self.plan.empty),
            "digests": {
                stored: {
                    "block": list(known.block),
                    "xxh3_64": base64.b64encode(known.values).decode("ascii"),
                }
                for stored, known in self.digests.items()
            },
            **({} if self.assets is None else {"assets": self.assets}),
            **({} if self.attached is None else {"attached": list(self.attached)}),
        }
        return content | unchanged.to_json(self.unchanged, self.digests)

    @classmethod
    def from_json(cls, raw: Any, *, path: str) -> Manifest:
        """Returns the manifest that parsed JSON represents, after checks; ``path`` is for messages.

        Raises:
          CorruptCheckpointError: ``raw`` is not a valid manifest, or is one of a version that this
            package cannot read.
        """
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CorruptCheckpointError(
                f"{path}: expected a manifest with format {FORMAT!r}, found {_brief(raw)}",
                path=path,
            )
        _check_version(raw, path)
        document, stacks, empty = raw.get("document"), raw.get("stacks"), raw.get("empty")
        if (
            not isinstance(document, dict)
            or not isinstance(stacks, dict)
            or not isinstance(empty, list)
            or not all(isinstance(m, list) for m in stacks.values())
            or not all(isinstance(name, str) for part in (empty, *stacks.values()) for name in part)
            or not isinstance(raw.get("versions"), dict)
            or not all(isinstance(version, str) for version in raw["versions"].values())
        ):
            raise CorruptCheckpointError(
                f"{path}: expected a manifest with 'document', 'stacks', 'empty' and 'versions' in "
                "the form that torchax_ckpt writes, found one without them or in another form. The "
                "file is damaged: use another step",
                path=path,
            )
        plan = Plan(
            {stored: tuple(members) for stored, members in stacks.items()}, frozenset(empty)
        )
        leaves: dict[str, dict[str, Any]] = {}
        for component in document:
            for node in array_nodes(document[component]):
                _check_array_node(node, path)
                # An array on devices of several processes is in the state of each of these
                # processes, so its node may occur several times.
                if component == names.PROCESSES and leaves.get(node["array"]) == node:
                    continue
                if node["array"] in leaves:
                    raise _corrupt(path, node["array"], "one leaf of this name", "two")
                leaves[node["array"]] = node
        _check_plan(plan, leaves, path)
        digests = _digests(raw.get("digests"), path)
        databases, digests = unchanged.from_json(raw.get("unchanged", {}), digests, path=path)
        assets = raw.get("assets")
        if assets is not None and not isinstance(assets, str):
            raise _corrupt(path, "assets", "the digest of the assets", _brief(assets))
        attached = raw.get("attached")
        if attached is not None:
            if not isinstance(attached, list) or not all(isinstance(n, str) for n in attached):
                raise _corrupt(path, "attached", "a list of components", _brief(attached))
            attached = tuple(attached)
        return cls(document, plan, raw["versions"], digests, databases, assets, attached)

    @functools.cached_property
    def leaves(self) -> Mapping[str, dict[str, Any]]:
        """Leaf name -> array node, for all leaves of the step."""
        return leaf_nodes(self.document)

    def stored(self, wanted: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns stored name -> (shape, dtype) of the arrays that contain ``wanted`` leaves."""
        located = self.plan.locate()
        result = {}
        for name in wanted:
            node = self.leaves[name]
            shape, dtype = tuple(node["shape"]), node["dtype"]
            if name in located:
                stored, _ = located[name]
                result[stored] = ((len(self.plan.stacks[stored]), *shape), dtype)
            elif name not in self.plan.empty:
                result[name] = (shape, dtype)
        return result


def array_nodes(node: Node) -> Iterator[dict[str, Any]]:
    """Yields ``node`` if it is an array node, or else all array nodes below it, at any depth."""
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            if "array" in current:
                yield current
            else:
                stack.extend(reversed(current.values()))
        elif isinstance(current, list):
            stack.extend(reversed(current))


def leaf_nodes(document: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """Returns leaf name -> array node, of all components of a document."""
    return {node["array"]: node for part in document.values() for node in array_nodes(part)}


def _check_version(raw: Mapping[str, Any], path: str) -> None:
    version = raw.get("version")
    if type(version) is int and version == VERSION:
        return
    what_to_do = "Read it with the release of torchax_ckpt that wrote it."
    if type(version) is int and version > VERSION:
        writers = raw.get("versions")
        writer = writers.get("torchax_ckpt") if isinstance(writers, dict) else None
        by = f", {_brief(writer)}" if isinstance(writer, str) else ""
        what_to_do = f"Install the release of torchax_ckpt that wrote it{by}, or a newer one."
    raise CorruptCheckpointError(
        f"{path}: expected manifest version {VERSION}, found {_brief(version)}. {what_to_do}",
        path=path,
    )


def _check_array_node(node: dict[str, Any], path: str) -> None:
    name, kind, shape = node["array"], node.get("kind"), node.get("shape")
    whole = node.get("whole", shape)  # the shape of the whole leaf, if the node is a host's part
    dtype: Any = node.get("dtype")
    if not (
        isinstance(name, str)
        and names.is_name(name)
        and isinstance(kind, str)
        and kind in KINDS
        and (kind != "key" or isinstance(node.get("impl"), str))
        and isinstance(dtype, str)
        and dtype in STORABLE_DTYPES
        and _is_shape(shape)
        and _is_shape(whole)
        and len(whole) == len(shape)
        and (kind != "numpy_scalar" or not shape)
    ):
        raise CorruptCheckpointError(
            f"{path}: malformed leaf {_brief(node)}",
            path=path,
            key_path=name if isinstance(name, str) else _brief(name),
        )
    for dims in (shape, whole):
        if len(dims) > MAX_RANK or math.prod(dim for dim in dims if dim) > MAX_ELEMENTS:
            raise _corrupt(
                path, name, f"at most {MAX_RANK} dims and {MAX_ELEMENTS} elements", _brief(dims)
            )


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(dim) is int and dim >= 0 for dim in value)


def _digests(raw: Any, path: str) -> dict[str, Digests]:
    if not isinstance(raw, dict):
        raise CorruptCheckpointError(f"{path}: the manifest lacks 'digests'", path=path)
    digests = {}
    for stored, entry in raw.items():
        try:
            block, values = entry["block"], base64.b64decode(entry["xxh3_64"], validate=True)
        except (TypeError, KeyError, ValueError):
            block, values = None, b""
        if not isinstance(block, list) or not all(type(dim) is int and dim > 0 for dim in block):
            raise CorruptCheckpointError(
                f"{path}: {stored}: malformed digests {_brief(entry)}", path=path, key_path=stored
            )
        digests[stored] = Digests(tuple(block), values)
    return digests


def _check_plan(plan: Plan, leaves: Mapping[str, dict[str, Any]], path: str) -> None:
    """Raises CorruptCheckpointError unless the manifest's storage plan fits the leaves.

    Each stack must consist of existing leaves of one dtype and shape, no leaf may be stored twice,
    and exactly the leaves without elements must be listed as empty.
    """
    for name in plan.empty ^ {n for n, node in leaves.items() if 0 in node["shape"]}:
        if name not in leaves:
            raise _corrupt(path, name, "a leaf of this name, which is listed in 'empty'", "none")
        expected, found = "no entry in 'empty', because the leaf has elements", "one"
        if name not in plan.empty:
            expected, found = "an entry in 'empty', because the leaf has no elements", "none"
        raise _corrupt(path, name, expected, found)
    stacked: set[str] = set()
    for stored, members in plan.stacks.items():
        if not names.is_name(stored.replace("*", "-")) or stored in leaves:
            raise _corrupt(
                path, stored, "a valid stack name that no leaf has", "an invalid or taken one"
            )
        if not members:
            raise _corrupt(path, stored, "a stack of leaves", "an empty stack")
        for member in members:
            if member not in leaves:
                raise _corrupt(path, member, f"a leaf in stack {_brief(stored)}", "none")
            if member in stacked or member in plan.empty:
                raise _corrupt(path, member, "a leaf stored in one place", "a leaf stored twice")
            stacked.add(member)
        forms = {(leaves[m]["dtype"], tuple(leaves[m]["shape"])) for m in members}
        if len(forms) > 1:
            raise _corrupt(path, stored, "leaves of one dtype and shape", _brief(sorted(forms)))


def _corrupt(path: str, name: str, expected: str, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {_brief(name)}: expected {expected}, found {found}", path=path, key_path=name
    )


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def _brief(value: Any) -> str:
    """Returns a value as text for an error message; shortens large and deeply nested values."""
    return _REPR.repr(value)


@functools.cache  # the metadata of torch alone takes milliseconds to parse
def _installed_version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def installed_versions() -> dict[str, str]:
    """Returns library -> installed version, or "unknown" if the library is not installed."""
    libraries = ("torchax_ckpt", "torch", "torchax", "jax", "orbax-checkpoint")
    return {library: _installed_version(library) for library in libraries}
