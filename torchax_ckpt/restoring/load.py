"""Loads a step's functional state, or the states of its components, and returns them.

Functional state is a pytree that a program passed to ``save(state=...)``. Components are attached
objects, such as a model and an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.layout import names
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring.local_tier import HostSteps
from torchax_ckpt.snapshot.move_shards import put
from torchax_ckpt.snapshot.sharding import Local
from torchax_ckpt.state import functional, per_process_state
from torchax_ckpt.state.component import Read, revive
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import require_jax_dtype
from torchax_ckpt.state.pytree import key_part
from torchax_ckpt.state.training_state import FUNCTIONAL
from torchax_ckpt.storage.arrays import foreign
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.stored.stored_step import StoredStep, about


def load_state(source: StoredStep | HostSteps, abstract_state: Any, processes: Processes) -> Any:
    """Returns a step's functional state or, without one, the states of its components.

    The keys of ``abstract_state`` select components.
    """
    committed = source.committed
    findings = Findings()
    prefix: tuple[str, ...] = ()
    if FUNCTIONAL in source.document:
        root, prefix = source.document[FUNCTIONAL], (FUNCTIONAL,)
    else:
        components = abstract_state.keys() if isinstance(abstract_state, Mapping) else None
        document = per_process_state.document_of(
            source.document, processes.index, processes.count, f"step {committed.step}"
        )
        root = {
            "dict": [[n, d] for n, d in document.items() if components is None or n in components]
        }
    with about(committed):
        request = functional.Request(root, abstract_state, prefix, findings)
        if findings:
            raise findings.error(committed.step, str(committed.path), "load")
        source.require_plausible(request.reads)
        return request.build(source.read_leaves(request.reads))


def load_foreign(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Returns the state of a step that bare Orbax wrote, in the structure of ``abstract_state``."""
    if abstract_state is None:
        return foreign.load_foreign(committed, None, options)
    _require_match(committed, abstract_state)
    leaves, treedef = jax.tree_util.tree_flatten(abstract_state)
    reads = {str(i): read for i, leaf in enumerate(leaves) if (read := functional.as_read(leaf))}
    abstract_leaves = [
        foreign.abstract_array(read.spec.shape, read.spec.dtype, _sharding(read))
        if (read := reads.get(str(i)))
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    state = jax.tree_util.tree_unflatten(treedef, abstract_leaves)
    loaded = foreign.load_foreign(committed, state, options)
    found = {str(i): leaf for i, leaf in enumerate(jax.tree_util.tree_leaves(loaded))}
    arrays = put({n: found[n] for n in reads}, {n: read.placement for n, read in reads.items()})
    revived = {n: revive(reads[n].spec.node(n), arrays[n]) for n in reads}
    return jax.tree_util.tree_unflatten(treedef, {**found, **revived}.values())


def _require_match(committed: CommittedStep, abstract_state: Any) -> None:
    """Raises MismatchError unless the step has every leaf of ``abstract_state``, in its form.

    Orbax would cast a leaf that differs, and return the abstract leaf for one that the step lacks.
    """
    stored = foreign.foreign_metadata(committed)
    findings = Findings()
    for path, abstract in jax.tree_util.tree_flatten_with_path(abstract_state)[0]:
        parts = [key_part(entry) for entry in path]
        name = names.join(parts)
        found: Any = stored
        for part in parts:
            children = (
                {str(k): v for k, v in found.items()}
                if isinstance(found, Mapping)
                else dict(zip(map(str, range(len(found))), found, strict=True))
                if isinstance(found, (list, tuple))
                else {}
            )
            found = children.get(part, _ABSENT)
        if found is _ABSENT:
            findings.missing.append(name)
        elif (read := functional.as_read(abstract)) is not None:
            if read.placement is not Local.HOST:
                require_jax_dtype(read.spec.dtype, name)
            shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
            if (shape, dtype) != (read.spec.shape, np.dtype(read.spec.dtype)):
                text = f"{dtype}{list(shape)}" if shape is not None else repr(found)
                findings.mismatch(name, read.spec.content(), text)
    if findings:
        raise findings.error(committed.step, str(committed.path), "load")


_ABSENT = object()


def _sharding(read: Read) -> Sharding | None:
    return None if isinstance(read.placement, Local) else read.placement
