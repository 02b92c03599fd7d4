"""The peers: how each saves and restores a flat dict of arrays, timed the same way.

``save`` returns when the training thread may go on, ``wait`` when the step is durable. ``restore``
returns when every array is ready on its sharding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import torch

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.policies import LatestN, PreserveAll


class Peer(Protocol):
    def save(self, step: int) -> None: ...
    def wait(self) -> None: ...
    def restore(self) -> Any: ...
    def close(self) -> None: ...


class OrbaxV0:
    """Bare Orbax, v0 ``CheckpointManager`` with ``StandardSave``, asynchronous."""

    waits = False

    def __init__(
        self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: int | None
    ) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._flat = ocp, flat
        self._manager = ocp.CheckpointManager(
            directory,
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, save_interval_steps=1),
        )

    def save(self, step: int) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(self._flat()))
        if self.waits:
            self._manager.wait_until_finished()

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self) -> Any:
        abstract = jax.tree.map(_abstract, self._flat())
        step = self._manager.latest_step()
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self._manager.close()


class Article(OrbaxV0):
    """The recipe in circulation: as above, and wait for every save."""

    waits = True


class OrbaxV1:
    """Bare Orbax, v1 ``training.Checkpointer``, asynchronous."""

    def __init__(
        self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: int | None
    ) -> None:
        from orbax.checkpoint import v1 as ocp

        self._flat = flat
        policies = ocp.training.preservation_policies
        self._checkpointer = ocp.training.Checkpointer(
            directory,
            preservation_policy=policies.LatestN(keep) if keep else policies.PreserveAll(),
        )

    def save(self, step: int) -> None:
        self._checkpointer.save_async(step, self._flat(), force=True)

    def wait(self) -> None:
        self._checkpointer.wait()

    def restore(self) -> Any:
        return self._checkpointer.load(
            self._checkpointer.latest, abstract_state=jax.tree.map(_abstract, self._flat())
        )

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave:
    """``torch.save`` of a CPU copy, in the training thread, fsynced."""

    def __init__(
        self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: int | None
    ) -> None:
        self._directory, self._flat = directory, flat
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        with backend.native_torch(), open(self._directory / "state.pt", "wb") as file:
            torch.save({k: torch.from_numpy(np.array(v)) for k, v in self._flat().items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def wait(self) -> None:
        pass

    def restore(self) -> Any:
        with backend.native_torch():
            loaded = torch.load(self._directory / "state.pt", weights_only=True)
            host = {k: v.numpy() for k, v in loaded.items()}
        live = self._flat()
        names = [n for n, v in live.items() if isinstance(v, jax.Array)]
        moved = jax.device_put([host[n] for n in names], [live[n].sharding for n in names])
        return {**host, **dict(zip(names, moved, strict=True))}

    def close(self) -> None:
        pass


class Ours:
    """This library, as its README says."""

    def __init__(
        self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: int | None
    ) -> None:
        self._module, self._optimizer, self._flat = module, optimizer, flat
        policy = LatestN(keep) if keep else PreserveAll()
        does_verify = os.environ.get("VERIFY") != "never"
        options = CheckpointOptions(verify="restore" if does_verify else "never")
        self._ckpt = TorchaxCheckpointer(directory, preservation_policy=policy, options=options)
        self._is_attached = False

    def save(self, step: int) -> None:
        if not self._is_attached:
            self._ckpt.attach(self._module, self._optimizer)
            self._is_attached = True
        self._ckpt.save(step, force=True)

    def wait(self) -> None:
        self._ckpt.wait_until_finished()

    def restore(self) -> Any:
        self._ckpt.attach(self._module, self._optimizer)
        return self._flat()

    def close(self) -> None:
        self._ckpt.close()


PEERS: dict[str, Callable[..., Peer]] = {
    "article": Article,
    "orbax_v0": OrbaxV0,
    "orbax_v1": OrbaxV1,
    "torch_save": TorchSave,
    "torchax_ckpt": Ours,
}


def _abstract(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return np.zeros(value.shape, value.dtype)
