"""Implements ``load``: reads a step, or the part that a pattern selects, and returns its values."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Mapping
from typing import Any

from torchax_ckpt.errors import ArgumentError, ForeignCheckpointError, SelectionError
from torchax_ckpt.layout import nodes
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.restoring.fallback import newest_readable, reading
from torchax_ckpt.restoring.local_tier import HostSteps
from torchax_ckpt.restoring.restorable_step import RestorableStep
from torchax_ckpt.runtime.user_messages import brief
from torchax_ckpt.state import functional, per_process_state
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.stored_entries import as_state_dict
from torchax_ckpt.state.training_state import FUNCTIONAL
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored import named_steps
from torchax_ckpt.stored.foreign_step import ForeignStep
from torchax_ckpt.stored.stored_step import StoredStep, about


@brief
def load(
    directory: str | os.PathLike[str],
    step: int | str | None = None,
    filter: str | None = None,
) -> Any:
    """Reads a step of a run, also while another program trains it; changes nothing there.

    Takes no lease, and needs no permission to write. On several processes, each reads by itself,
    and gets the state that process 0 had saved of its own.

    Args:
      directory: that of the run or of one of its steps, also ``gs://...`` or ``s3://...``.
      step: completed optimizer steps of the checkpoint; ``"latest"`` or None for the newest
        readable step; ``"best:loss"``, ``"best:loss:min"`` or ``"best:accuracy:max"`` for the best
        readable step by a metric, as for ``TorchaxCheckpointer.restore``.
      filter: as for ``TorchaxCheckpointer.load``.

    Returns:
      As ``TorchaxCheckpointer.load`` without ``abstract_state``.

    Raises:
      StepNotFoundError, SelectionError: there is no such step; no name matches ``filter``.
      CorruptCheckpointError, DirectoryError: the step is damaged; it cannot be read now.
    """
    require_filter(filter, None)
    run = RunDirectory(directory, read_only=True, reads_step=True)
    options = CheckpointOptions(read_only=True)

    def attempt(committed: CommittedStep) -> Any:
        with reading(committed, run, SINGLE_PROCESS):
            try:
                stored = StoredStep(committed, options)
            except ForeignCheckpointError:
                stored = ForeignStep(committed, options)
            return load_state(RestorableStep(stored), None, filter, SINGLE_PROCESS, warns=False)

    state, _ = newest_readable(lambda: named_steps.candidates(run, step), attempt)
    return state


def require_filter(filter: Any, abstract_state: Any) -> None:
    """Raises ArgumentError for what is no pattern, or for one beside an abstract state."""
    if not isinstance(filter, str | None):
        raise ArgumentError(f"filter: expected a pattern such as 'model/*', found {filter!r:.80}")
    if filter is not None and abstract_state is not None:
        raise ArgumentError(
            f"load: expected abstract_state or filter, found both (filter={filter!r:.80}): leave "
            "filter out, and give an abstract_state that has only what you want"
        )


def load_state(
    source: RestorableStep | HostSteps,
    abstract_state: Any,
    pattern: str | None,
    processes: Processes,
    *,
    warns: bool = True,
) -> Any:
    """Returns a step's functional state, or the states of its components.

    Returns only the components in ``abstract_state`` if there is one, and only values whose names
    match ``pattern`` if there is one. ``warns`` if another number of processes saved the step.
    """
    committed = source.committed
    findings = Findings()
    prefix: tuple[str, ...] = ()
    is_foreign = isinstance(source, RestorableStep) and isinstance(source.stored, ForeignStep)

    def takes(name: str) -> bool:
        return pattern is None or fnmatch.fnmatchcase(name, pattern)

    if FUNCTIONAL in source.document:
        root = source.document[FUNCTIONAL]
        prefix = () if is_foreign else (FUNCTIONAL,)
    else:
        components = abstract_state.keys() if isinstance(abstract_state, Mapping) else None
        stored = source.document.items()
        document = per_process_state.document_of(
            source.document,
            processes.index,
            processes.count,
            f"step {committed.step}",
            taken=[
                name
                for name, node in stored
                if warns and (pattern is None or nodes.selected(node, (name,), takes))
            ],
        )
        if abstract_state is None:
            document = {n: as_state_dict(node, n) for n, node in document.items()}
        root = {
            "dict": [[n, d] for n, d in document.items() if components is None or n in components]
        }
    with about(committed):
        if pattern is not None:
            root = _selected(root, prefix, takes, pattern, committed, is_foreign)
        request = functional.Request(root, abstract_state, prefix, findings, is_foreign=is_foreign)
        if findings and isinstance(abstract_state, str):
            raise ArgumentError(
                "load: abstract_state: expected a pytree of shapes and dtypes, found "
                f"{abstract_state!r:.80}: give a pattern as filter={abstract_state!r:.80}"
            )
        if findings:
            raise findings.error(committed.step, str(committed.path), "load")
        source.require_plausible(request.reads)
        return request.build(source.read_leaves(request.reads))


def _selected(
    root: Any,
    prefix: tuple[str, ...],
    takes: Callable[[str], bool],
    pattern: str,
    committed: CommittedStep,
    is_foreign: bool,
) -> Any:
    found = nodes.selected(root, prefix, takes)
    if not found:
        where = f"The command torchax-ckpt show {committed.path} lists the names"
        if is_foreign:
            where = "Orbax alone wrote it, so its names are those of its tree, such as params/*"
        raise SelectionError(
            f"filter: expected a pattern that matches a leaf or a value of step {committed.step} "
            f"in {committed.path}, found {pattern!r:.100}, which matches none. {where}",
            step=committed.step,
            path=committed.path,
        )
    return found[0]
