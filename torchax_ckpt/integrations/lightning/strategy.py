"""Owns how a Trainer works on torchax: where modules and batches are, and what it cannot do there.

torchax computes gradients from functions, not from tensors, so training is Lightning's manual
optimization. Everything else of a Trainer works as on any device.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torchax
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from torchax_ckpt.integrations.lightning import tensor_patches

_HOW_TO_TRAIN = (
    "torchax has no loss.backward(): set self.automatic_optimization = False, take gradients in "
    "training_step with torchax.interop.jax_value_and_grad over torch.func.functional_call, put "
    "them in parameter.grad, and step the optimizers that self.optimizers() gives"
)


class TorchaxStrategy(SingleDeviceStrategy):
    """Trains a module on JAX devices through torchax.

    One process drives all its devices: to Lightning they are one device, and what is on which
    of them is said by the shardings of the module's arrays. A module on the CPU is moved to the
    default device, with ties and identities kept; one that is on ``"jax"`` already, sharded or
    not, stays as it is, and one on ``"meta"`` is left to ``TorchaxCheckpoint``. After training
    the module stays where it is. Enables torchax globally, if the program has not.

    Raises:
      MisconfigurationException: a module with automatic optimization is to be trained.
    """

    strategy_name = "torchax"

    def __init__(self) -> None:
        super().__init__(device=torch.device("jax", 0), accelerator=_JaxDevices())
        tensor_patches.complete()  # already here: metrics are often made before training begins

    def setup_environment(self) -> None:
        """Enables torchax, if the program has not."""
        if not _is_enabled():
            torchax.enable_globally()
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Moves the module, and makes its optimizers.

        Raises:
          MisconfigurationException: automatic optimization was asked for.
        """
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING and self.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self.lightning_module).__name__} asks for automatic optimization, but "
                f"{_HOW_TO_TRAIN}"
            )
        # Under torch.inference_mode operations reach torchax whole that it knows only in parts.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Moves a module that is on the CPU; its parameters stay the same objects."""
        assert self.model is not None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if not any(tensor.device.type == "cpu" for tensor in tensors):
            return
        # Otherwise torch makes new parameters, which ties and users' references do not follow.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            self.model.to(self.root_device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def process_dataloader(self, dataloader: object) -> object:
        """Tells a sampler its epoch before anybody asks it for indices.

        Lightning does it afterwards, which is too late for a loader that goes on within an epoch.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            epochs: Any = trainer.fit_loop.epoch_progress.current
            _set_sampler_epoch(dataloader, epochs.processed)
        return super().process_dataloader(dataloader)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What ``manual_backward`` calls; there is no such thing here.

        Raises:
          MisconfigurationException: always.
        """
        raise MisconfigurationException(f"manual_backward cannot work: {_HOW_TO_TRAIN}")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What ``trainer.save_checkpoint`` and ``ModelCheckpoint`` call.

        Raises:
          MisconfigurationException: always.
        """
        raise MisconfigurationException(
            "Lightning's own checkpoints are made with torch.save, which cannot store tensors of "
            "torchax: give the Trainer callbacks=[TorchaxCheckpoint(directory)], or "
            "enable_checkpointing=False"
        )

    def teardown(self) -> None:
        """Ends training. The module stays on its devices, for whoever uses it next."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()


class _JaxDevices(Accelerator):
    """JAX's devices, which need no setting up."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("jax", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "torchax"


def _is_enabled() -> bool:
    # env.enabled does not say: it is reset by the first operation.
    try:
        return torch.zeros((), device="jax") is not None
    except (NotImplementedError, RuntimeError):
        return False
