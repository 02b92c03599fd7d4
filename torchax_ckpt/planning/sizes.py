"""Computes the bytes of a training state, and of the ramdisk that each host needs for it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments

if TYPE_CHECKING:
    import torch

MOMENTS: dict[str, int] = {
    **dict.fromkeys(("none", "sgd"), 0),
    **dict.fromkeys(("adagrad", "asgd", "muon", "rmsprop", "sgd_momentum"), 1),
    **dict.fromkeys(("adadelta", "adam", "adamw", "nadam", "radam", "rprop"), 2),
}
"""Number of values that an optimizer keeps for each trained parameter.

The scalars that an optimizer keeps per tensor, a few bytes each, are not counted. ``rmsprop`` has
its default options: neither centered nor with momentum.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The sizes of a training state and its parts in bytes, without compression.

    Attributes:
      parameters_bytes: the weights; tied weights count once.
      optimizer_bytes: the optimizer's moments.
      buffers_bytes: the buffers that a module stores, for example running means.
    """

    parameters_bytes: int
    optimizer_bytes: int
    buffers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole state, which is the size of one checkpoint."""
        return self.parameters_bytes + self.optimizer_bytes + self.buffers_bytes


def state_bytes(
    num_params: int,
    *,
    optimizer: str | float = "adamw",
    param_bytes: float = 4,
    moment_bytes: float | None = None,
) -> StateBytes:
    """Returns the size of the state of a model whose parameters are all trained.

    The default is 12 bytes per parameter: a float32 weight and AdamW's two float32 moments. For
    bfloat16 weights and float32 moments, use ``param_bytes=2, moment_bytes=4``; with float32 master
    weights besides, ``param_bytes=6, moment_bytes=4``.

    Args:
      num_params: the number of parameters.
      optimizer: a key of ``sizes.MOMENTS``, or the number of values that the optimizer keeps per
        parameter (Adafactor's factored moments: about 0).
      param_bytes: bytes of one weight and its master copy, if there is one.
      moment_bytes: bytes of one value of the optimizer; None for ``param_bytes``, as in
        torch.optim.

    Raises:
      PlanError: a number is out of range, or the optimizer is unknown.
    """
    arguments.count(
        "num_params", num_params, "give the number of parameters, for example 70_000_000_000"
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
    """Returns the size of a module's training state: parameters, moments and persistent buffers.

    Args:
      module: a module on any device, also on ``"meta"``. Frozen parameters have no moments.
      optimizer: as for ``state_bytes``.
      moment_bytes: bytes of one value of the optimizer; None for those of the parameter's dtype.

    Raises:
      PlanError: ``module`` is no module, or the optimizer is unknown.
    """
    if not callable(getattr(module, "state_dict", None)):
        raise PlanError(
            f"module: expected a torch.nn.Module, found {type(module).__name__}; "
            "if you only know the number of parameters, call state_bytes"
        )
    num_moments = _num_moments(optimizer)
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    # keep_vars gives the module's own tensors, so tied ones are the same object. A state dict has
    # persistent buffers only, and extra state that need not be a tensor.
    values = module.state_dict(keep_vars=True).values()
    stored = {id(t): t for t in values if hasattr(t, "numel") and hasattr(t, "dtype")}
    for parameter in parameters:
        stored.pop(id(parameter), None)
    return StateBytes(
        parameters_bytes=sum(_nbytes(p) for p in parameters),
        optimizer_bytes=math.ceil(
            sum(p.numel() * num_moments * (moment_bytes or p.dtype.itemsize) for p in trained)
        ),
        buffers_bytes=sum(map(_nbytes, stored.values())),
    )


def ramdisk_bytes_per_host(total_bytes: int, *, hosts_per_slice: int, num_copies: int = 2) -> int:
    """Returns the bytes that two-tier saving needs on the ramdisk of each host.

    Each slice holds the whole state, spread over its hosts. The result has 15 % on top, for
    metadata and for hosts that hold more than their share, as the makers of Orbax published.

    Args:
      total_bytes: bytes of one checkpoint.
      hosts_per_slice: number of hosts over which one checkpoint is spread.
      num_copies: number of checkpoints that exist at the same time, one of which is being written:
        3 with ``LocalTier(keep=2)``.

    Raises:
      PlanError: a number is out of range.
    """
    arguments.count("total_bytes", total_bytes, "give the bytes of one checkpoint, an int")
    arguments.count("hosts_per_slice", hosts_per_slice, "each slice has at least one host")
    arguments.count(
        "num_copies",
        num_copies,
        "the checkpoints that stay plus the one being written, by default 2",
    )
    return -(-total_bytes * num_copies * 115 // (100 * hosts_per_slice))


def _num_moments(optimizer: str | float) -> float:
    if isinstance(optimizer, str):
        if optimizer not in MOMENTS:
            raise PlanError(
                f"optimizer: expected one of {', '.join(sorted(MOMENTS))}, found {optimizer!r}; "
                "for any other optimizer give an int: how many values it keeps per parameter"
            )
        return MOMENTS[optimizer]
    arguments.at_least(
        "optimizer", optimizer, 0, "give its name, or its number of values per parameter"
    )
    return optimizer


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
