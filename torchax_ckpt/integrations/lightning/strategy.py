"""Runs a Lightning Trainer on JAX devices through torchax."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import torch
import torchax
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._mode_utils import no_dispatch
from torchax.tensor import Tensor

_HOW_TO_TRAIN = (
    "torchax has no loss.backward(): set self.automatic_optimization = False, take gradients in "
    "training_step with torchax.interop.jax_value_and_grad over torch.func.functional_call, put "
    "them in parameter.grad, and step the optimizers that self.optimizers() returns"
)
_HOW_TO_SAVE = (
    "to save, give the Trainer callbacks=[TorchaxCheckpoint(directory)]; to train without saves, "
    "give the Trainer enable_checkpointing=False"
)
_HOW_TO_CAST = (
    'use precision="bf16-true", or cast in the function of which training_step takes gradients; '
    "for float64 set JAX's option jax_enable_x64"
)
_HOW_TO_DISTRIBUTE = (
    "one process drives all of its JAX devices, which Lightning sees as one. Shard the arrays of "
    "the module, for example with TorchaxCheckpoint(shardings=...); start several processes with "
    "jax.distributed, each with a Trainer of its own"
)


class TorchaxStrategy(SingleDeviceStrategy):
    """Trains a module on JAX devices through torchax.

    torchax computes gradients of functions, not of tensors, so modules must use Lightning's manual
    optimization, and cannot call ``manual_backward``. One process drives all of its JAX devices,
    which Lightning sees as one; the shardings of the module's arrays decide which device holds
    which data. The strategy moves a module from the CPU to the default device; parameters stay the
    same objects, and tied parameters stay tied. It leaves a module on ``"jax"`` as it is, sharded
    or not, and one on ``"meta"`` for ``TorchaxCheckpoint`` to fill. After training the module stays
    on its devices. Enables torchax globally if the program has not done so.

    Raises:
      MisconfigurationException: the module to train uses automatic optimization; or the Trainer has
        an argument that would have no effect, such as ``precision="bf16-mixed"`` or ``devices=2``.
    """

    strategy_name = "torchax"
    # A Trainer sets these on a strategy that has them.
    num_nodes = 1
    _layer_sync: Any = None

    def __init__(self) -> None:
        super().__init__(device=torch.device("jax", 0), accelerator=_JaxDevices())
        # The patches are applied this early, because programs often create metrics before training.
        _patch_torchax()

    def setup_environment(self) -> None:
        """Enables torchax globally, if the program has not done so."""
        if not _is_enabled():
            torchax.enable_globally()
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Moves the module to its device and creates its optimizers."""
        assert self.lightning_module is not None
        self._refuse_ineffective(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self.lightning_module).__name__} uses automatic optimization, but "
                f"{_HOW_TO_TRAIN}"
            )
        # torch.inference_mode does not decompose composite operations, and torchax implements only
        # their parts.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        super().setup(trainer)

    def _refuse_ineffective(self, trainer: Trainer) -> None:
        """Raises for arguments of the Trainer that Lightning passes on, and nothing here obeys."""
        plugin, writer = self.precision_plugin, type(self.checkpoint_io).__name__
        of_lightning = type(plugin).__module__.startswith("lightning.")
        is_double = isinstance(plugin, DoublePrecision) and jax.config.read("jax_enable_x64")
        is_obeyed = type(plugin) is Precision or isinstance(plugin, HalfPrecision) or is_double
        for argument, is_ineffective, instead in (
            (f"precision={plugin.precision!r}", of_lightning and not is_obeyed, _HOW_TO_CAST),
            (f"num_nodes={self.num_nodes}", self.num_nodes != 1, _HOW_TO_DISTRIBUTE),
            ("sync_batchnorm=True", self._layer_sync is not None, "JAX normalizes whole batches"),
            ("detect_anomaly=True", trainer._detect_anomaly, "set JAX's option jax_debug_nans"),
            (f"plugins=[{writer}()]", writer != "TorchCheckpointIO", _HOW_TO_SAVE),
        ):
            if is_ineffective:
                raise _ineffective(argument, instead)

    def model_to_device(self) -> None:
        """Moves a module from the CPU to the default device; parameters stay the same objects."""
        assert self.model is not None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if not any(tensor.device.type == "cpu" for tensor in tensors):
            return
        # Without swapping, torch would create new parameters, and ties and users' references would
        # still point to the old ones.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            self.model.to(self.root_device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def process_dataloader(self, dataloader: object) -> object:
        """Sets the epoch of a loader's sampler before the loader reads the sampler's indices."""
        # Lightning sets it later: too late for a loader that resumes within an epoch.
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            epochs: Any = trainer.fit_loop.epoch_progress.current
            _set_sampler_epoch(dataloader, epochs.processed)
        return super().process_dataloader(dataloader)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses ``manual_backward``: torchax computes gradients of functions, not of tensors."""
        raise MisconfigurationException(f"manual_backward cannot work: {_HOW_TO_TRAIN}")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses ``trainer.save_checkpoint``: ``torch.save`` cannot store torchax tensors."""
        raise MisconfigurationException(
            "Lightning writes its own checkpoints with torch.save, which cannot store torchax "
            f"tensors: {_HOW_TO_SAVE}"
        )

    def teardown(self) -> None:
        """Tears down precision plugin and accelerator, but leaves the module on its JAX devices."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()


class _JaxDevices(CPUAccelerator):
    """Presents JAX's devices to Lightning as one, which needs no more set-up than a CPU."""

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        if devices not in ("auto", 1, "1", [0]):
            raise _ineffective(f"devices={devices!r}", _HOW_TO_DISTRIBUTE)
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("jax", 0)]

    @staticmethod
    def name() -> str:
        return "torchax"


def _ineffective(argument: str, instead: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"Trainer({argument}) has no effect under TorchaxStrategy. Remove it: {instead}"
    )


def _is_enabled() -> bool:
    # env.enabled is no indication, because the first operation resets it.
    try:
        return torch.zeros((), device="jax") is not None
    except (NotImplementedError, RuntimeError):
        return False


# --- operations that Lightning needs and torchax 0.0.13 lacks ------------------------------------
#
# With them ``self.log`` accepts device scalars without waiting for the device, and callbacks can
# print or copy logged values.

_EMPTY = torch.ops.aten.empty.memory_format


@functools.cache
def _patch_torchax() -> None:
    torchax.default_env().override_op_definition(_EMPTY, _empty)
    for name, method in (("__format__", _format), ("__deepcopy__", _deepcopy)):
        if name not in vars(Tensor):
            setattr(Tensor, name, method)


def _empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns an uninitialized tensor on the requested device, as torch does."""
    # torchax returns a tensor on "jax" even if one on the CPU is requested, as copy.deepcopy does
    # of the initial values of metrics, including those of self.log.
    device = kwargs.get("device")
    with no_dispatch(), torch._C.DisableTorchFunction():
        plain = _EMPTY(*args, **{**kwargs, "device": "cpu", "pin_memory": None})
    is_plain = device is not None and torch.device(device).type == "cpu"
    return plain if is_plain else torchax.default_env().to_xla(plain)


def _format(self: Tensor, spec: str) -> str:
    """Formats a 0-d tensor as torch does, for example in ``f"{loss:.3f}"``."""
    return format(self.item(), spec) if spec and self.ndim == 0 else object.__format__(self, spec)


def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """Returns a new tensor that shares the JAX array of ``self``, because arrays are immutable."""
    if id(self) not in memo:
        copied: Any = Tensor(self.jax(), torchax.default_env(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
    return memo[id(self)]
