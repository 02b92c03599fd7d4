"""A load planner of DCP that compares whole state dicts, and that never unpickles."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torchax_ckpt.errors import CallError, MismatchError
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.torch.state_trees import compare


class StepMeta(StorageMeta):
    """Which step ``StorageReader`` opened: the path, and the number as ``save_id``."""


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Compares the whole state dict with a step, and loads its values without unpickling.

    DCP's own planner stops at the first name that differs, and calls ``torch.load`` on values. This
    one is for ``StorageReader`` only. The arguments are those of ``DefaultLoadPlanner``; with
    ``allow_partial_load``, what the step lacks stays as it is.

    Raises:
      MismatchError: lists all names, shapes and dtypes that differ; nothing was changed.
      CallError: the storage reader is another one, or names of parameters that are digits stand in
        a flattened optimizer state.
    """

    def set_up_planner(
        self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Refuses what other readers found, whose values are pickles."""
        if (
            metadata is not None
            and metadata.state_dict_metadata  # empty if StorageReader failed, which it raises next
            and not isinstance(metadata.storage_meta, StepMeta)
        ):
            raise CallError(
                "LoadPlanner: expected the metadata of torchax_ckpt's StorageReader, found that of "
                "another storage reader, whose values are pickles. Use this planner with "
                "StorageReader, and DCP's own planner with other readers"
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Compares, and returns the plan of DCP's planner."""
        assert self.metadata is not None
        findings = Findings()
        for name, value in self.state_dict.items():
            match str(self.mappings.get(name, ("",))[-1]).split("."):
                case ["param_groups", parameter, _] if parameter.isdecimal():
                    raise CallError(
                        f"{name}: is this of parameter {parameter}, or of group {parameter}? Where "
                        "names are digits, use flatten_optimizer_state_dict=False"
                    )
            stored = self.metadata.state_dict_metadata.get(name)
            if stored is not None:
                compare(name, value, _stand_in(stored), findings)
            elif not self.allow_partial_load:
                findings.missing.append(name)
        if findings:
            raise differences(findings, self.metadata)
        return super().create_local_plan()

    def load_value(self, item: ReadItem, value: Any) -> None:
        """Puts a value that is no tensor into the state dict."""
        name = item.dest_index.fqn
        if not self.flatten_state_dict:
            self.state_dict[name] = value
            return
        *parents, last = self.mappings[name]
        container = self.original_state_dict
        for part in parents:
            container = container[_key(container, part)]
        container[_key(container, last)] = value


def _key(container: Any, part: str | int) -> Any:
    """Returns the key that DCP's path has as text, such as one of MultiStepLR's ``milestones``."""
    if isinstance(part, int) or part in container:
        return part
    return next(key for key in container if str(key) == part)


def differences(findings: Findings, metadata: dcp.Metadata) -> MismatchError:
    """Returns the error that lists the findings about the step with this metadata."""
    step = metadata.storage_meta
    assert step is not None, "made by StorageReader"
    return findings.error(int(step.save_id or 0), str(step.checkpoint_id), "dcp.load")


def _stand_in(stored: STORAGE_TYPES) -> torch.Tensor | None:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
