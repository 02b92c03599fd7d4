"""A storage reader of ``torch.distributed.checkpoint`` (DCP) for the steps of a run.

DCP gathers the plans of all ranks on one rank before any rank changes a tensor. By then this reader
has read and compared what its rank needs, and the plans carry what it found: so all ranks load the
same step, and none loads a step that is damaged for another.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.restoring.fallback import newest_readable
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.foreign_step import opened
from torchax_ckpt.torch.flattened_step import FlattenedStep, Parts

T = TypeVar("T")


class StorageReader(dcp.StorageReader):
    """Reads a step of a run for ``torch.distributed.checkpoint.load``, on any number of ranks.

    Each rank reads the slices that its tensors and DTensors need, and compares them with their
    digests before a tensor is changed::

        state = {"model": model_state, "optimizer": optimizer_state}  # of get_state_dict
        dcp.load(state, storage_reader=StorageReader(run), planner=LoadPlanner())

    Names are those of DCP: a model's tensors have their names in torch below ``model``; the state
    of the optimizer is named as ``torch.distributed.checkpoint.state_dict.get_state_dict`` names
    it, flattened or not, below ``optimizer``; what else was attached has the names that ``attach``
    gave it. A tied weight has all its names. Steps of bare Orbax have the keys of their pytree,
    and no digests.

    Each rank holds what it needs in host memory until all ranks have read, at most twice its size.
    Values that are no tensors are plain (numbers, strings, bytes, and dicts, lists and tuples of
    them) or numpy arrays. The random state of torch, numpy and Python is under ``rng``.

    Args:
      run: the directory of the run or of one of its steps, also ``gs://...`` or ``s3://...``.
      step: completed optimizer steps of the checkpoint; None for the newest that all ranks can
        read. Each newer one that is damaged is a UserWarning.
      prefix: the key below which all state stands in the program's state dict; or a mapping from
        ``model``, ``optimizer``, ... to the keys that they have there. The key "" stands for no
        key: ``prefix={"model": ""}`` loads into ``model.state_dict()``.

    Raises:
      CheckpointException: of DCP, by ``load``, on all ranks. ``failures`` has this package's
        errors by rank: StepNotFoundError, CorruptCheckpointError, DirectoryError, or
        MismatchError, if a dtype differs. A stored 32-bit number may become one of 64 bits,
        because ``.to("jax")`` narrowed it. Nothing was changed, unless a rank that had read a
        newer step finds the chosen one damaged.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        step: int | None = None,
        prefix: str | Mapping[str, str] = "",
    ) -> None:
        self._run = RunDirectory(run, read_only=True, reads_step=True)
        self._step, self._prefix = step, prefix
        self._told: set[str] = set()  # components that a warning about other ranks may have named
        self.reset()

    def __repr__(self) -> str:
        return f"StorageReader({str(self._run.path)!r}, step={self._step})"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load; DCP calls it. A ``checkpoint_id`` is refused: give ``step``."""
        if checkpoint_id is not None:
            raise ValueError(
                f"checkpoint_id: expected None, found {checkpoint_id!r}: this reader was given "
                "its run and step. Leave checkpoint_id out"
            )
        self._candidates: list[CommittedStep] = []
        self._unreadable: set[tuple[int, int]] = set()
        self._planned: FlattenedStep | None = None
        self._read: tuple[FlattenedStep, Parts] | None = None
        self._failure: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Returns names, shapes and dtypes of the newest step whose manifest is intact."""
        self.reset()  # DCP resets a reader only if it gets a checkpoint_id
        try:
            self._candidates = self._run.candidates(self._step)
            self._planned = self._newest(self._opened)
            return self._planned.metadata
        except Exception as error:
            # DCP would only log an exception of this method; the next method raises it.
            self._failure = error
            return dcp.Metadata({})

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raises what ``read_metadata`` could not raise."""
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Reads what this rank needs, of the newest step that it can read."""
        self._read = self._newest(lambda committed: self._read_of(committed, plan))
        found = [[c.key for c in self._candidates], [*self._unreadable]]
        return dataclasses.replace(plan, storage_data=found)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Chooses the newest step that all ranks have found, and can read."""
        for committed in reversed(self._candidates):
            key = committed.key
            found = (plan.storage_data for plan in plans)
            if all(key in there and key not in unreadable for there, unreadable in found):
                return [dataclasses.replace(plan, storage_data=key) for plan in plans]
        raise CorruptCheckpointError(
            f"{self._run.path}: expected a step that all {len(plans)} ranks can read, found none: "
            f"each of the steps {[c.step for c in self._candidates]} is damaged or gone for a rank",
            path=self._run.path,
        )

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """Fills the tensors and values of the plan with what was read."""
        assert self._read is not None
        step, parts = self._read
        self._read = None
        if step.committed.key != plan.storage_data:
            (chosen,) = (c for c in self._candidates if c.key == plan.storage_data)
            other = step.committed.step
            user_messages.warn(f"loading step {chosen.step}: another rank cannot read step {other}")
            step, parts = self._read_of(chosen, plan)
        step.fill(plan.items, planner, parts)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: a program chooses this reader itself."""
        return False

    def _newest(self, attempt: Callable[[CommittedStep], T]) -> T:
        """Returns ``attempt`` of the newest readable step; records newer ones, damaged or gone."""
        tried = []

        def noted(committed: CommittedStep) -> T:
            tried.append(committed.key)
            return attempt(committed)

        left = [c for c in self._candidates if c.key not in self._unreadable]
        result, _ = newest_readable(lambda: left, noted)
        self._unreadable |= {*tried[:-1]}
        return result

    def _opened(self, committed: CommittedStep) -> FlattenedStep:
        return FlattenedStep(opened(committed), self._prefix)

    def _read_of(self, committed: CommittedStep, plan: LoadPlan) -> tuple[FlattenedStep, Parts]:
        assert self._planned is not None
        is_planned = committed == self._planned.committed
        step = self._planned if is_planned else self._opened(committed)
        return step, step.read(plan.items, self._planned, self._told)
