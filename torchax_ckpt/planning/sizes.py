"""Owns the sizes: how many bytes a training state has, and what they need on a ramdisk."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments

if TYPE_CHECKING:
    import torch

MOMENTS: dict[str, int] = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamw": 2,
    "asgd": 1,
    "muon": 1,
    "nadam": 2,
    "none": 0,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
    "sgd_momentum": 1,
}
"""Values that an optimizer keeps for each trained parameter; its per-tensor scalars, a few bytes
each, are not counted. ``rmsprop`` is that of the defaults, neither centered nor with momentum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """How many bytes a training state has when it is stored uncompressed.

    Attributes:
      parameters_bytes: the weights, tied ones once.
      optimizer_bytes: the optimizer's moments.
      buffers_bytes: what a module stores beside its parameters, running means for one.
    """

    parameters_bytes: int
    optimizer_bytes: int
    buffers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything, which is what one checkpoint weighs."""
        return self.parameters_bytes + self.optimizer_bytes + self.buffers_bytes


def state_bytes(
    num_params: int,
    *,
    optimizer: str | float = "adamw",
    param_bytes: float = 4,
    moment_bytes: float | None = None,
) -> StateBytes:
    """The state of a model with so many parameters, all of them trained.

    With the defaults 12 bytes per parameter: a float32 weight and AdamW's two float32 moments.
    Weights in bfloat16 whose moments are kept in float32 have ``param_bytes=2, moment_bytes=4``;
    with float32 master weights beside them, ``param_bytes=6, moment_bytes=4``.

    Args:
      num_params: the number of parameters.
      optimizer: one of ``sizes.MOMENTS``, or how many values it keeps per parameter (Adafactor's
        factored moments: about 0).
      param_bytes: bytes of one weight, master copy included.
      moment_bytes: bytes of one value of the optimizer; None for those of a weight, since
        torch.optim keeps moments in the parameter's dtype.

    Raises:
      PlanError: a number makes no sense, or the optimizer is unknown.
    """
    arguments.count(
        "num_params", num_params, "give the number of parameters, 70_000_000_000 for one"
    )
    arguments.positive("param_bytes", param_bytes, "4 is float32, 2 is bfloat16")
    if moment_bytes is None:
        moment_bytes = param_bytes
    arguments.at_least("moment_bytes", moment_bytes, 0, "4 is float32, 2 is bfloat16")
    return StateBytes(
        parameters_bytes=math.ceil(num_params * param_bytes),
        optimizer_bytes=math.ceil(num_params * _num_moments(optimizer) * moment_bytes),
    )


def module_state_bytes(
    module: torch.nn.Module,
    *,
    optimizer: str | float = "adamw",
    moment_bytes: float | None = None,
) -> StateBytes:
    """The state of a module, each parameter in its own dtype; frozen ones have no moments.

    Args:
      module: on any device. One built under ``torch.device("meta")`` takes no memory.
      optimizer: as in ``state_bytes``; it is taken to train whatever requires a gradient.
      moment_bytes: bytes of one value of the optimizer; None for those of its parameter.

    Raises:
      PlanError: this is no module, or the optimizer is unknown.
    """
    if not callable(getattr(module, "state_dict", None)):
        raise PlanError(
            f"module: expected a torch.nn.Module, found {type(module).__name__}; "
            "for a bare number of parameters call state_bytes"
        )
    num_moments = _num_moments(optimizer)
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    # Live tensors, so that tied ones are the same object, and persistent buffers alone.
    stored = {id(t): t for t in module.state_dict(keep_vars=True).values() if _is_tensor(t)}
    for parameter in parameters:
        stored.pop(id(parameter), None)
    return StateBytes(
        parameters_bytes=sum(_nbytes(p) for p in parameters),
        optimizer_bytes=math.ceil(
            sum(p.numel() * num_moments * (moment_bytes or p.dtype.itemsize) for p in trained)
        ),
        buffers_bytes=sum(map(_nbytes, stored.values())),
    )


def ramdisk_bytes_per_host(
    total_bytes: int, *, hosts_per_slice: int, num_copies: int = 2, headroom: float = 0.15
) -> int:
    """What two tiers need on the ramdisk of every host.

    Each slice holds the whole state, spread over its hosts, and several times, since the last
    checkpoint stays until the next is complete. The default is the published formula.

    Args:
      total_bytes: of one checkpoint.
      hosts_per_slice: hosts that share it.
      num_copies: checkpoints that exist at the same time: with ``LocalTier(keep=2)``, 3.
      headroom: fraction on top, for metadata, and for hosts that hold more than their share.

    Raises:
      PlanError: a number makes no sense.
    """
    arguments.count("total_bytes", total_bytes, "give the bytes of one checkpoint, an int")
    arguments.count("hosts_per_slice", hosts_per_slice, "each slice has at least one host")
    arguments.count("num_copies", num_copies, "those that stay, and the one being written: 2")
    arguments.at_least("headroom", headroom, 0, "0.15 means 15 % on top")
    exact = total_bytes * num_copies * (1 + headroom) / hosts_per_slice
    return math.ceil(round(exact, 3))  # 1.15 has no exact binary form: no byte for its error


def _num_moments(optimizer: str | float) -> float:
    if isinstance(optimizer, str):
        if optimizer not in MOMENTS:
            raise PlanError(
                f"optimizer: expected one of {', '.join(MOMENTS)}, found {optimizer!r}; for "
                "another one give the number of values it keeps per parameter"
            )
        return MOMENTS[optimizer]
    arguments.at_least("optimizer", optimizer, 0, "give its name, or its values per parameter")
    return optimizer


def _is_tensor(value: object) -> bool:
    """State dicts may also hold what ``get_extra_state`` returns."""
    return hasattr(value, "numel") and hasattr(value, "dtype")


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
