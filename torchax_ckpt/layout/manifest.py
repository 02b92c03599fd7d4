"""Owns the manifest: the JSON that explains every array of a step, and its checks.

    {"format": "torchax_ckpt", "version": 0, "versions": {...}, "document": {component: node},
     "stacks": {stored name: [member names]}, "empty": [names]}

``document`` describes the whole state; its array nodes name the leaves. What a node looks like
is owned by ``state/tree.py``, which writes and reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.plan import Plan

FORMAT = "torchax_ckpt"
# 0 while the format may still change; readers refuse what is newer than they are.
VERSION = 0

KINDS = frozenset({"torchax", "torch", "jax", "numpy", "numpy_scalar", "key"})
# What TensorStore holds: numpy's dtypes but float128 and complex256, and most of ml_dtypes'.
STORABLE_DTYPES = frozenset(
    ["bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
     "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn",
     "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz",
     "float8_e8m0fnu"]
)  # fmt: skip

Node = Any
"""One node of the document: JSON (None, bool, int, float, str, list, dict)."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step holds.

    Attributes:
      document: component (``model``, ``optimizer``, ...) -> its node.
      plan: where each leaf is stored.
      versions: the libraries that wrote the step, by name; for people, not for decisions.
    """

    document: Mapping[str, Node]
    plan: Plan
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON-able Python."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "versions": dict(self.versions),
            "document": dict(self.document),
            "stacks": {stored: list(members) for stored, members in self.plan.stacks.items()},
            "empty": sorted(self.plan.empty),
        }

    @classmethod
    def from_json(cls, raw: Any, *, path: str) -> Manifest:
        """Checks and reads a manifest.

        Raises:
          CorruptCheckpointError: not a manifest, or one of a version this package cannot read.
        """
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CorruptCheckpointError(
                f"{path}: expected a manifest with format {FORMAT!r}, found {_brief(raw)}",
                path=path,
            )
        if raw.get("version") != VERSION:
            raise CorruptCheckpointError(
                f"{path}: expected manifest version {VERSION}, found {raw.get('version')!r}. "
                "Read it with the release of torchax_ckpt that wrote it.",
                path=path,
            )
        document, stacks, empty = raw.get("document"), raw.get("stacks"), raw.get("empty")
        if (
            not isinstance(document, dict)
            or not isinstance(stacks, dict)
            or not isinstance(empty, list)
            or not all(isinstance(m, list) for m in stacks.values())
            or not all(isinstance(name, str) for part in (empty, *stacks.values()) for name in part)
            or not isinstance(raw.get("versions"), dict)
        ):
            raise CorruptCheckpointError(
                f"{path}: the manifest lacks 'document', 'stacks', 'empty' or 'versions', or they "
                "have the wrong form",
                path=path,
            )
        for component in document.values():
            for node in array_nodes(component):
                _check_array_node(node, path)
        return cls(
            document=document,
            plan=Plan(
                stacks={stored: tuple(members) for stored, members in stacks.items()},
                empty=frozenset(empty),
            ),
            versions=raw["versions"],
        )


def array_nodes(node: Node) -> Iterator[dict[str, Any]]:
    """Every array node at or below this node, in order."""
    if isinstance(node, dict):
        if "array" in node:
            yield node
        else:
            for child in node.values():
                yield from array_nodes(child)
    elif isinstance(node, list):
        for child in node:
            yield from array_nodes(child)


def _check_array_node(node: dict[str, Any], path: str) -> None:
    name, kind, shape = node["array"], node.get("kind"), node.get("shape")
    dtype: Any = node.get("dtype")
    if not (
        isinstance(name, str)
        and isinstance(kind, str)
        and kind in KINDS
        and (kind != "key" or isinstance(node.get("impl"), str))
        and isinstance(dtype, str)
        and dtype in STORABLE_DTYPES
        and isinstance(shape, list)
        and all(type(dim) is int and dim >= 0 for dim in shape)
    ):
        raise CorruptCheckpointError(
            f"{path}: malformed leaf {_brief(node)}", path=path, key_path=str(name)
        )


def _brief(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
