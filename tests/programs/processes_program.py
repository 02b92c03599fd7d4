"""What programs on several processes share: see ``support.run_processes``.

    python PROGRAM INDEX COUNT PORT ...

The model is sharded over the devices of all processes; each process has its own part of the data,
its own random state, and a loader with a position of its own.

Environment: ``SKEW_SECS`` is what the clock of process 1 is ahead by, ``HEARTBEAT_SECS`` how long
JAX waits for a process that is silent.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src import distributed

# A test may import this for its functions.
is_started = len(sys.argv) > 3 and sys.argv[1].isdigit()
INDEX, COUNT, PORT = (int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]) if is_started else (0, 1, "")
if INDEX == 1 and (skew_secs := int(os.environ.get("SKEW_SECS", "0"))):
    # Before anything imports these functions by name.
    secs, nanoseconds = time.time, time.time_ns
    time.time = lambda: secs() + skew_secs
    time.time_ns = lambda: nanoseconds() + skew_secs * 10**9
if COUNT > 1:  # before anything starts the devices
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    settings: dict[str, Any] = {}
    if "HEARTBEAT_SECS" in os.environ:  # JAX takes it since 0.7
        settings["heartbeat_timeout_seconds"] = int(os.environ["HEARTBEAT_SECS"])
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, INDEX, **settings)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torchax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from support.training import fsdp_rule  # noqa: E402
from torchax import interop  # noqa: E402

from torchax_ckpt import torchax_backend  # noqa: E402

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()), ("fsdp",))


def die() -> None:
    """Ends each process as SIGKILL does: process 0 last, since JAX aborts the others without it."""
    if COUNT > 1:
        client: Any = distributed.global_state.client
        if INDEX > 0:
            client.key_value_set(f"dies/{INDEX}", str(os.getpid()))
        for index in range(1, COUNT if INDEX == 0 else 1):
            pid = int(client.blocking_key_value_get(f"dies/{index}", 100_000))
            with contextlib.suppress(ProcessLookupError):  # has ended, and was waited for
                select.select([os.pidfd_open(pid)], [], [], 100)
    os.kill(os.getpid(), signal.SIGKILL)


rule = fsdp_rule(MESH)


def spread(host: np.ndarray, *spec: Any, mesh: Mesh = MESH, kind: str = "device") -> jax.Array:
    """An array over the devices of all processes, by default the first dim over all of them."""
    spec = () if host.ndim == 0 else spec or ("fsdp",)
    sharding = NamedSharding(mesh, P(*spec), memory_kind=kind)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


def shards(array: Any) -> list[bytes]:
    """The bytes of the shards of this process, or of an array on the host."""
    if not isinstance(array, jax.Array):
        return [array.tobytes()]
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def init(name: str, abstract: Any) -> np.ndarray:
    """The same on every process and mesh."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return np.random.default_rng(seed).standard_normal(abstract.shape).astype(abstract.dtype)


class Loader:
    """Batches of this process's part of the data, in a random order of its own."""

    def __init__(self) -> None:
        self.position = 0
        self.generator = torch.Generator().manual_seed(100 + INDEX)

    def state_dict(self) -> dict[str, Any]:
        with torchax_backend.native_torch():
            return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        with torchax_backend.native_torch():
            self.generator.set_state(state["generator"])

    def __next__(self) -> np.ndarray:
        with torchax_backend.native_torch():
            seed = int(torch.randint(1 << 30, (), generator=self.generator)) + self.position
        self.position += 1
        return np.random.default_rng(seed).standard_normal((16 // COUNT, 8)).astype(np.float32)


LEARNING_RATE = 1e-2
MOMENTS = ("exp_avg", "exp_avg_sq")


@jax.jit
def adamw(
    arrays: dict[str, tuple[jax.Array, ...]], gradients: dict[str, jax.Array], count: float
) -> dict[str, tuple[jax.Array, ...]]:
    """Returns the parameters and moments after step ``count``, with AdamW's default settings."""

    def after(name: str) -> tuple[jax.Array, ...]:
        (parameter, mean, square), gradient = arrays[name], gradients[name]
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        size = jax.numpy.sqrt(square / (1 - 0.999**count)) + 1e-8
        parameter = (1 - LEARNING_RATE * 0.01) * parameter
        return parameter - LEARNING_RATE * mean / (1 - 0.9**count) / size, mean, square

    return {name: after(name) for name in arrays}


class Training:
    """A model of two layers with AdamW, its loader, and random state seeded by process."""

    def __init__(
        self, seed: int = 0, width: int = 256, mesh: Mesh = MESH, rule: Any = None
    ) -> None:
        self._mesh, self._rule = mesh, rule or fsdp_rule(mesh)
        # Wide enough for shards that storage does not put into its index.
        with torch.device("meta"):
            self.model = torch.nn.Sequential(
                torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 8)
            )
            self.model.add_module(
                "blocks", torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            )
        torchax.enable_globally()
        torch.manual_seed(seed + INDEX), np.random.seed(seed + INDEX), random.seed(seed + INDEX)
        torchax.default_env().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.loader = Loader()
        self.seen: list[float] = []
        self._gradients = interop.jax_jit(interop.jax_value_and_grad(self._loss))

    def attach(self, ckpt: Any, **kwargs: Any) -> int:
        return ckpt.attach(
            self.model,
            self.optimizer,
            dataloader=self.loader,
            shardings=self._rule,
            init=init,
            **kwargs,
        )

    def _loss(self, parameters: Any, x: torch.Tensor) -> torch.Tensor:
        def forward(x: torch.Tensor) -> torch.Tensor:
            hidden = torch.func.functional_call(
                self.model[:3],
                {k: v for k, v in parameters.items() if not k.startswith("blocks")},
                (x,),
            )
            for i in range(3):
                w, b = parameters[f"blocks.{i}.weight"], parameters[f"blocks.{i}.bias"]
                hidden = torch.nn.functional.linear(hidden, w, b)
            return hidden

        return (forward(x) ** 2).mean()

    def step(self) -> torch.Tensor:
        """One step on a batch that every process has its part of, with noise of its own."""
        noise = np.random.random() + random.random() + float(torch.rand(()))
        mine = next(self.loader) + np.float32(noise)
        self.seen.append(float(mine.sum()))
        sharding = NamedSharding(self._mesh, P(self._mesh.axis_names))
        batch = jax.make_array_from_process_local_data(sharding, mine, (16, 8))
        loss, grads = self._gradients(
            dict(self.model.named_parameters()), interop.torch_view(batch)
        )
        self._update({name: torchax_backend.buffer(grad) for name, grad in grads.items()})
        return loss

    def _update(self, gradients: dict[str, jax.Array]) -> None:
        """A step of AdamW with the state of ``self.optimizer``, as one compiled function.

        Otherwise each process would compile a hundred operations, most for one shape only.
        """
        parameters = dict(self.model.named_parameters())
        state = self.optimizer.state
        for parameter in parameters.values():
            if not state[parameter]:
                array = torchax_backend.buffer(parameter)
                with torchax_backend.native_torch():
                    zero = torch.tensor(0.0)
                zeros = jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)
                state[parameter].update(
                    step=zero,
                    exp_avg=torchax_backend.wrap(zeros),
                    exp_avg_sq=torchax_backend.wrap(zeros),
                )
            with torchax_backend.native_torch():
                state[parameter]["step"] += 1
                count = float(state[parameter]["step"])
        tensors = {n: (p, *map(state[p].get, MOMENTS)) for n, p in parameters.items()}
        arrays = jax.tree.map(torchax_backend.buffer, tensors)
        found = adamw(arrays, gradients, count)
        jax.tree.map(torchax_backend.set_buffer, tensors, found)

    def arrays(self) -> dict[str, Any]:
        """Every device array of model and optimizer."""
        found = {n: torchax_backend.buffer(p) for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if torchax_backend.is_device_tensor(value):
                    found[f"{name}/{key}"] = torchax_backend.buffer(value)
        return found

    def own(self) -> dict[str, str]:
        """Digests of the state that each process has for itself."""
        with torchax_backend.native_torch():
            state = {
                "torch": torch.get_rng_state().numpy(),
                "generator": self.loader.generator.get_state().numpy(),
            }
        state["numpy"] = np.random.get_state(legacy=False)["state"]["key"]
        state["python"] = np.array(random.getstate()[1])
        state["torchax"] = np.asarray(jax.random.key_data(torchax.default_env().prng_key))
        state["position"] = np.array(self.loader.position)
        return {name: digest(value) for name, value in state.items()}

    def whole(self) -> dict[str, str]:
        """Digests of whole arrays, which do not depend on the mesh."""
        from jax.experimental import multihost_utils

        return {
            name: digest(np.asarray(multihost_utils.process_allgather(array, tiled=True)))
            for name, array in self.arrays().items()
        }


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def listening() -> list[str]:
    """The addresses that this process accepts connections at."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in mine:
                words = np.frombuffer(bytes.fromhex(place.partition(":")[0]), ">u4")
                address = ipaddress.ip_address(words.astype("=u4").tobytes())
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return found


patches = contextlib.ExitStack()  # a live group closes it after each program


def patch(owner: Any, name: str, value: Any) -> None:
    """Gives an object another attribute for the rest of this program."""
    patches.enter_context(mock.patch.object(owner, name, value))


def report(**values: Any) -> None:
    """What this process has to say to the test."""
    print(json.dumps(values), flush=True)
