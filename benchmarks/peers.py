"""The peers that are compared: each saves and restores a pytree of arrays.

``save`` returns when the training thread may continue, and may donate what it saved; ``wait`` when
the step is durable. ``restore`` returns when every array is ready on its sharding. A peer gets a
module and its optimizer, and a function that returns their arrays. If the state is a pytree, they
are None, and the function returns the pytree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import CheckpointOptions, Mirror, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.policies import LatestN, PreserveAll


class Peer:
    """The interface of a peer."""

    def save(self, step: int) -> None:
        raise NotImplementedError

    def is_saving(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    def restore(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class OrbaxV0(Peer):
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

    def is_saving(self) -> bool:
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self) -> Any:
        abstract = jax.tree.map(_abstract, self._flat())
        step = self._manager.latest_step()
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self._manager.close()


class Article(OrbaxV0):
    """The recipe of published articles: bare Orbax v0, waiting for each save."""

    waits = True


class OrbaxV1(Peer):
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

    def is_saving(self) -> bool:
        return self._checkpointer.is_saving_in_progress()

    def wait(self) -> None:
        self._checkpointer.wait()

    def restore(self) -> Any:
        return self._checkpointer.load(
            self._checkpointer.latest, abstract_state=jax.tree.map(_abstract, self._flat())
        )

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave(Peer):
    """``torch.save`` of a CPU copy, in the training thread, fsynced."""

    def __init__(
        self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: int | None
    ) -> None:
        self._directory, self._flat = directory, flat
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        with torchax_backend.native_torch(), open(self._directory / "state.pt", "wb") as file:
            torch.save(jax.tree.map(lambda v: torch.from_numpy(np.array(v)), self._flat()), file)
            file.flush()
            os.fsync(file.fileno())

    def restore(self) -> Any:
        with torchax_backend.native_torch():
            loaded = torch.load(self._directory / "state.pt", weights_only=True)
            host = [v.numpy() for v in jax.tree.leaves(loaded)]
        live, structure = jax.tree.flatten(self._flat())
        places = [i for i, v in enumerate(live) if isinstance(v, jax.Array)]
        moved = jax.device_put([host[i] for i in places], [live[i].sharding for i in places])
        for i, array in zip(places, moved, strict=True):
            host[i] = array
        return jax.tree.unflatten(structure, host)


class Ours(Peer):
    """This library, used as its README shows."""

    def __init__(
        self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: int | None
    ) -> None:
        self._module, self._optimizer, self._flat = module, optimizer, flat
        self._ckpt = _checkpointer(directory, keep)
        self._is_attached = False

    def save(self, step: int) -> None:
        if self._module is None:
            self._ckpt.save(step, state=self._flat(), force=True)
            return
        if not self._is_attached:
            self._ckpt.attach(self._module, self._optimizer)
            self._is_attached = True
        self._ckpt.save(step, force=True)

    def is_saving(self) -> bool:
        return self._ckpt._saver.is_saving

    def wait(self) -> None:
        self._ckpt.wait_until_finished()

    def restore(self) -> Any:
        if self._module is None:
            self._ckpt.attach()
            return self._ckpt.load(abstract_state=self._flat())
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


def _checkpointer(directory: Path, keep: int | None) -> TorchaxCheckpointer:
    policy = LatestN(keep) if keep else PreserveAll()
    does_verify = os.environ.get("VERIFY") != "never"
    options = CheckpointOptions(verify="restore" if does_verify else "never")
    url = os.environ.get("MIRROR")
    mirror = Mirror(url, close_timeout_secs=5) if url else None
    return TorchaxCheckpointer(
        directory, preservation_policy=policy, mirror=mirror, options=options
    )


def _abstract(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return np.zeros(value.shape, value.dtype)
