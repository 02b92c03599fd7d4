"""A module that a Trainer trains, and what of a training must come back; for test_lightning.py.

    python lightning_program.py DIRECTORY SEED OPTIONS BLOW

trains it with the options (JSON, of ``Run``) and prints the outcome as JSON. The blow (JSON, say
``["SIGKILL", "step", 1, 3]``) falls in batch 3 of epoch 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import jax
import lightning
import numpy as np
import torch
import torchax
from lightning.pytorch.callbacks import EarlyStopping
from support.compare import bits
from support.training import fsdp_mesh, fsdp_rule
from torchax import interop
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import CheckpointOptions, RandomState, policies
from torchax_ckpt.integrations.lightning import TorchaxCheckpoint, TorchaxStrategy

BATCH, EXAMPLES = 4, 28  # seven batches an epoch


class Examples(torch.utils.data.Dataset[Any]):
    """Noisy examples: the noise comes from the generators that belong to the process."""

    def __init__(self, is_noisy: bool = True) -> None:
        self.x = np.random.default_rng(7).standard_normal((EXAMPLES, 8)).astype(np.float32)
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[int, np.ndarray]:
        noise = np.float32(np.random.random() + random.random() + float(torch.rand(())))
        return i, self.x[i] + (noise if self.is_noisy else 0)


class ByEpoch(torch.utils.data.Sampler[int]):
    """An order for each epoch, as DistributedSampler has it: without a state."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.epoch).permutation(EXAMPLES).tolist())

    def __len__(self) -> int:
        return EXAMPLES


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same examples, of which nobody knows how many there are."""

    def __iter__(self) -> Any:
        examples = Examples()
        return (examples[i] for i in range(len(examples)))


_compiled: list[Any] = []


def gradients_of(net: torch.nn.Module) -> Any:
    """Loss and gradients from parameters, a batch and a key; compiled once for all nets."""

    def loss(params: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
        with torchax.default_env().override_property(prng=interop.jax_view(key)):
            out = torch.func.functional_call(net, params, (x,))
        return ((out - x) ** 2).mean()

    if not _compiled:
        _compiled.append(interop.jax_jit(interop.jax_value_and_grad(loss)))
    return _compiled[0]


class Module(lightning.LightningModule):
    """Two nets with an optimizer each, dropout, a moving average and schedulers of both kinds."""

    def __init__(self, accumulate: int, blow: list[Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 8)
        )
        self.head = torch.nn.Linear(8, 8)
        self.net[2].weight = self.head.weight  # tied
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(8, 8))
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.zeros(8))
        self.accumulate, self.blow = accumulate, blow
        self.seen: list[Any] = []
        self.validated = 0
        self.gradients = gradients_of(self.net)

    def on_train_start(self) -> None:
        torch.rand(3), random.random()  # also in a resumed run, where it must not matter

    def on_train_epoch_start(self) -> None:
        np.random.random()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        index, x = batch
        self.strike("step", batch_idx)
        if self.blow[1:] == ["scratch", self.current_epoch, batch_idx]:
            self.scratch.add_(1)
            self.strike("scratch", batch_idx)
        self.seen.append([self.current_epoch, batch_idx, torchax_list(index), torchax_list(x[0])])
        key = torchax.default_env().get_and_rotate_prng_key()
        if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        params = dict(self.net.named_parameters())
        loss, grads = self.gradients(params, x, interop.torch_view(key))
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        for name, parameter in params.items():
            old = parameter.grad
            parameter.grad = grads[name] if old is None else old + grads[name]
        self.head.bias.grad = torch.ones_like(self.head.bias)
        if (batch_idx + 1) % self.accumulate == 0:
            one, two = cast(list[Any], self.optimizers())
            one.step()
            self.strike("between", batch_idx)
            two.step()
            one.zero_grad(), two.zero_grad()
        cast(list[Any], self.lr_schedulers())[0].step()  # also while gradients accumulate

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # After the callbacks' hooks of this name.
        if (batch_idx + 1) % self.accumulate:
            return
        self.average.mul_(0.9).add_(cast(torch.Tensor, self.net[0].weight).detach() * 0.1)

    def on_train_epoch_end(self) -> None:
        cast(list[Any], self.lr_schedulers())[1].step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.strike("validation", batch_idx)
        self.validated += 1
        np.random.random()
        self.log("val_loss", ((self.net(batch[1]) - batch[1]) ** 2).mean())

    def on_validation_epoch_end(self) -> None:
        schedulers = self.lr_schedulers()  # none where the Trainer only validates
        if schedulers and not self.trainer.sanity_checking:
            cast(list[Any], schedulers)[0].step()
        self.strike("validated", 0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", ((self.net(batch[1]) - batch[1]) ** 2).mean())

    def configure_optimizers(self) -> Any:
        one = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        two = torch.optim.SGD([self.head.bias], lr=1e-2, momentum=0.9)
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(one, 0.98),
            torch.optim.lr_scheduler.StepLR(two, 2),
        ]
        return [one, two], schedulers

    def strike(self, where: str, batch_idx: int) -> None:
        """What was asked for happens, if it was asked for here."""
        here = [where, self.current_epoch, batch_idx]
        if self.trainer.sanity_checking or self.blow[1:] != here:
            return
        match self.blow[0]:
            case "error":
                raise RuntimeError("asked for")
            case "interrupt":
                raise KeyboardInterrupt
            case "stop":
                self.trainer.should_stop = True
            case "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            case "SIGKILL":
                cast(Any, self.trainer.checkpoint_callback).checkpointer.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["validated"] = self.validated

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validated = checkpoint["validated"]


def torchax_list(tensor: torch.Tensor) -> Any:
    return np.asarray(interop.jax_view(tensor)).tolist()


@dataclasses.dataclass(kw_only=True)
class Run:
    """One training: of the Trainer, of the loader, and of the module."""

    max_epochs: int | None = 2
    max_steps: int = -1
    val_check_interval: float | int | None = None
    check_val_every_n_epoch: int | None = 1
    limit_train_batches: int | float = 1.0
    loader: str = "stateful"
    workers: int = 0
    generator: bool = False
    accumulate: int = 1
    sharded: bool = False
    save_at: tuple[int, ...] = ()
    monitor: str | None = None

    def loaders(self) -> tuple[Any, Any]:
        kind = torch.utils.data.DataLoader if self.loader == "torch" else StatefulDataLoader
        generator = torch.Generator().manual_seed(3) if self.generator else None
        if self.loader == "by-epoch":
            train = StatefulDataLoader(Examples(), BATCH, sampler=ByEpoch())
            return train, torch.utils.data.DataLoader(Examples(), BATCH)
        is_stream = self.loader == "stream"
        train = kind(
            Stream() if is_stream else Examples(is_noisy=not self.workers),
            BATCH,
            shuffle=None if is_stream else True,
            num_workers=self.workers,
            generator=generator,
        )
        return train, torch.utils.data.DataLoader(Examples(), BATCH)

    def checkpoint(self, directory: Path | str, **options: Any) -> TorchaxCheckpoint:
        """Keeps all its steps."""
        rule = fsdp_rule(fsdp_mesh(4)) if self.sharded else None
        return TorchaxCheckpoint(
            directory,
            monitor=self.monitor,
            save_decision_policy=policies.SpecificStepsPolicy(list(self.save_at)),
            preservation_policy=policies.PreserveAll(),
            options=CheckpointOptions(preemption_grace_secs=120.0),
            shardings=rule,
            **options,
        )

    def trainer(self, checkpoint: Any = None, *callbacks: Any, **options: Any) -> lightning.Trainer:
        # Where it looks at the ends of epochs, it finds what is known of older ones.
        at_epoch_end = True if self.max_epochs != -1 and self.max_steps != -1 else None
        stopping = EarlyStopping("val_loss", patience=50, check_on_train_epoch_end=at_epoch_end)
        return lightning.Trainer(
            **{
                "strategy": TorchaxStrategy(),
                "max_epochs": self.max_epochs,
                "max_steps": self.max_steps,
                "val_check_interval": self.val_check_interval,
                "check_val_every_n_epoch": self.check_val_every_n_epoch,
                "limit_train_batches": self.limit_train_batches,
                "limit_val_batches": 2,
                "callbacks": [stopping, *([checkpoint] if checkpoint else []), *callbacks],
                "enable_checkpointing": checkpoint is not None,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                **options,
            }
        )

    def module(self, seed: int, *blow: Any) -> Module:
        """A new one, in a process seeded anew; it strikes where the blow says."""
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        torchax.default_env().manual_seed(seed)
        return Module(self.accumulate, list(blow))


def outcome(trainer: Any, module: Module) -> dict[str, Any]:
    """Digests of everything that must be the same."""
    optimizers = [
        {
            "state": [dict(o.state[p]) for g in o.param_groups for p in g["params"]],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups],
        }
        for o in trainer.optimizers
    ]
    loops = {k: v for k, v in trainer.fit_loop.state_dict().items() if k != "state_dict"}
    state = {
        "module": dict(module.state_dict()),
        "optimizers": optimizers,
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "loops": loops,
        "logger_step": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "stopping": trainer.early_stopping_callback.state_dict(),
        "validated": module.validated,
        "rng": RandomState().state_dict(),
    }
    devices = [len(interop.jax_view(p).sharding.device_set) for p in module.parameters()]
    return {"seen": module.seen, "state": digests(state), "devices": devices}


def digests(state: Any, where: str = "") -> dict[str, str]:
    if isinstance(state, dict):
        items: Any = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        is_array = isinstance(state, (torch.Tensor, jax.Array, np.ndarray, np.generic))
        value = bits(state) if is_array else state
        return {where: hashlib.sha256(repr(value).encode()).hexdigest()[:16]}
    return {k: v for name, child in items for k, v in digests(child, f"{where}/{name}").items()}


def train(run: Run, seed: int, checkpoint: Any = None, *blow: Any, **options: Any) -> Any:
    """A whole training with new objects; its outcome."""
    module = run.module(seed, *blow)
    trainer = run.trainer(checkpoint, **options)
    trainer.fit(module, *run.loaders())
    return outcome(trainer, module)


def main(directory: str, seed: str, options: str, blow: str) -> None:
    warnings.simplefilter("ignore")
    torchax.enable_globally()
    run = Run(**json.loads(options))
    print(json.dumps(train(run, int(seed), run.checkpoint(directory), *json.loads(blow))))


if __name__ == "__main__":
    main(*sys.argv[1:])
