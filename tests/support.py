"""What several tests need: exact comparison, small models, training steps, processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torchax import interop

from torchax_ckpt import torchax_backend

P = PartitionSpec
# For the environment of programs that come several times: they compile the same.
COMPILED_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("TORCHAX_CKPT_TESTS_COMPILED", ""),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def bits(value: Any) -> tuple[Any, ...]:
    """Everything about an array but its sharding: kind, dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        if torchax_backend.is_device_tensor(value):
            return ("torchax", *bits(torchax_backend.buffer(value))[1:])
        with torchax_backend.native_torch():
            return ("torch", *bits(torchax_backend.to_numpy(value))[1:])
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(value))
            return ("key", impl, *bits(jax.random.key_data(value))[1:])
        return ("jax", *bits(np.asarray(value))[1:])
    kind = "numpy_scalar" if isinstance(value, np.generic) else "numpy"
    array = np.asarray(value)
    return (kind, array.dtype.name, array.shape, array.tobytes())


def assert_trees_identical(found: Any, expected: Any, *, shardings: bool = True) -> None:
    """Asserts the same structure, types, dtypes, shapes, bytes and (optionally) shardings."""
    _compare(found, expected, shardings, "tree")


def _compare(found: Any, expected: Any, shardings: bool, where: str) -> None:
    if isinstance(expected, (torch.Tensor, jax.Array, np.ndarray, np.generic)):
        assert bits(found) == bits(expected), f"{where}: {found!r} is not {expected!r}"
        if shardings and (a := _jax(expected)) is not None:
            b = _jax(found)
            assert b is not None
            assert a.committed == b.committed, f"{where}: committed {b.committed}"
            assert not a.committed or b.sharding.is_equivalent_to(a.sharding, a.ndim), (
                f"{where}: {b.sharding} is not {a.sharding}"
            )
        return
    assert type(found) is type(expected), f"{where}: {type(found)} is not {type(expected)}"
    if isinstance(expected, Mapping):
        assert list(found.keys()) == list(expected.keys()), f"{where}: keys {list(found)}"
        for key in expected:
            _compare(found[key], expected[key], shardings, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: length {len(found)}"
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            _compare(f, e, shardings, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert np.float64(found).tobytes() == np.float64(expected).tobytes(), (
            f"{where}: {found!r} is not {expected!r}"
        )
    else:
        assert found == expected, f"{where}: {found!r} is not {expected!r}"


def _jax(value: Any) -> jax.Array | None:
    if isinstance(value, jax.Array):
        return value
    return torchax_backend.buffer(value) if torchax_backend.is_device_tensor(value) else None


def copied(value: Any) -> Any:
    """A deep copy of a tree of tensors and plain values, to compare with later."""
    if isinstance(value, torch.Tensor):
        if torchax_backend.is_device_tensor(value):
            return torchax_backend.wrap(torchax_backend.buffer(value))  # arrays do not change
        with torchax_backend.native_torch():
            return torchax_backend.from_numpy(torchax_backend.to_numpy(value))
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return np.array(value) if isinstance(value, np.ndarray) else value


def training_state(*parts: Any) -> list[Any]:
    """What must come back: tensors of modules by name, state of optimizers by parameter order."""
    state: list[Any] = []
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            groups = [{k: v for k, v in g.items() if k != "params"} for g in part.param_groups]
            moments = [dict(part.state[p]) for g in part.param_groups for p in g["params"]]
            state.append(copied({"groups": groups, "moments": moments}))
        else:
            state.append(copied(dict(part.state_dict())))
    return state


def entries(directory: Path) -> set[str]:
    """What is in a run's directory besides the record of its events."""
    return {child.name for child in directory.iterdir()} - {"events"}


def fsdp_mesh(num_devices: int = 8, axis: str = "fsdp") -> Mesh:
    """A one-axis mesh over the first devices, with the Auto axes that torchax needs."""
    return Mesh(np.array(jax.devices()[:num_devices]), (axis,))


def fsdp_rule(mesh: Mesh) -> Any:
    """A sharding rule: the first dim that divides, else replicated."""
    (axis,) = mesh.axis_names

    def rule(name: str, abstract: Any) -> NamedSharding:
        size = mesh.shape[axis]
        for dim, length in enumerate(abstract.shape):
            if length and length % size == 0:
                return NamedSharding(mesh, P(*[None] * dim, axis))
        return NamedSharding(mesh, P())

    return rule


@contextlib.contextmanager
def before_enabling() -> Iterator[None]:
    """As in a program that has not enabled torchax yet: the place to build meta modules."""
    torchax.disable_globally()
    try:
        yield
    finally:
        torchax.enable_globally()


def mlp(width: int = 16, bias: bool = True) -> torch.nn.Module:
    """A small classifier on torchax's default device."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, width, bias=bias), torch.nn.Tanh(), torch.nn.Linear(width, 4, bias=bias)
    ).to("jax")


_grads: dict[int, Any] = {}


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    """One step of jitted value_and_grad and an eager torch.optim step, on data of this seed."""

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, params, (x,))
        return torch.nn.functional.cross_entropy(out, y)

    if id(model) not in _grads:
        _grads[id(model)] = (interop.jax_jit(interop.jax_value_and_grad(loss)), model)
    data = np.random.default_rng(seed)
    env = torchax.default_env()
    x = env.to_xla(torch.from_numpy(data.standard_normal((8, 8)).astype(np.float32)))
    y = env.to_xla(torch.from_numpy(data.integers(0, 4, 8).astype(np.int32)).long())
    value, grads = _grads[id(model)][0](dict(model.named_parameters()), x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]
    optimizer.step()
    return value


def run_torture(program: Path, *args: str) -> tuple[int, dict[str, int], str]:
    """Exit code, table and output of a harness, which starts processes of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), *args],
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    table = {
        name.strip(): int(value)
        for name, value in re.findall(r"^(.+?) +(\d+)$", result.stdout, re.MULTILINE)
    }
    return result.returncode, table, result.stdout + result.stderr[-4000:]


class Started:
    """A program in a process of its own, with what it writes.

    Args:
      arguments: of ``python``: ``-c`` and the program, or a script; and the program's own.
      devices: that JAX has; as many as the program itself asks for, if None.
      env: more variables.
      fresh: an interpreter that has imported nothing yet, rather than one as in ``forked.py``.
      modules: what is imported already, if it is not fresh.
    """

    def __init__(
        self,
        *arguments: str,
        devices: int | None = 8,
        env: Mapping[str, str] = {},
        fresh: bool = False,
        modules: Sequence[str] = forked.MODULES,
    ) -> None:
        self._arguments = arguments
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        out, err = self._outputs
        variables = environment(devices, env)
        self.process: forked.Process
        if fresh:
            command = [sys.executable, *arguments]
            self.process = subprocess.Popen(command, env=variables, stdout=out, stderr=err)
        else:
            self.process = forked.start(
                arguments, env=variables, stdout=out, stderr=err, modules=modules
            )

    def output(self) -> tuple[str, str]:
        """What it has written to stdout and stderr so far."""
        # Not by seeking: the process writes where these files stand.
        out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in self._outputs)
        return out, err

    def result(self, timeout_secs: float) -> subprocess.CompletedProcess[str]:
        """How it ended; it is killed if it has not after that time."""
        with self:
            code = self.process.wait(timeout_secs)
            return subprocess.CompletedProcess(self._arguments, code, *self.output())

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in self._outputs:
            file.close()


class Talking:
    """A program in a process of its own, whose lines are read as they come.

    Args:
      arguments, env, fresh, modules: as of :class:`Started`; env is the whole environment.
    """

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str],
        fresh: bool = False,
        modules: Sequence[str] = forked.MODULES,
    ) -> None:
        reading, writing = os.pipe()
        self.lines = open(reading)  # noqa: SIM115
        self.process: forked.Process
        with open(writing, "w") as both:
            if fresh:
                command = [sys.executable, *arguments]
                self.process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=both, stderr=both
                )
            else:
                self.process = forked.start(
                    arguments, env=env, stdout=both, stderr=both, modules=modules
                )

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()


class Running:
    """Processes of one program that runs on several, each with devices of its own.

    Args:
      source: the program; ``tests`` is importable in it. Its first arguments are its index, how
        many there are, and the port of JAX's coordination service.
      count: how many processes.
      args: more arguments.
      devices: of each process.
      timeout_secs: they are ended by the kernel after that, whatever becomes of the test.
      fresh: see :class:`Started`.
    """

    def __init__(
        self,
        source: str,
        count: int,
        *args: str,
        devices: int = 2,
        env: Mapping[str, str] = {},
        timeout_secs: int = 280,
        fresh: bool = False,
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        self._timeout_secs = timeout_secs
        lines = f"import signal; signal.alarm({timeout_secs})\n" + textwrap.dedent(source)
        # Else JAX's coordination service listens on every address of this machine.
        bound = {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}"}
        variables = {**COMPILED_ONCE, **bound, **env}
        self._started = [
            Started(
                *("-c", lines, str(index), str(count), port, *args),
                devices=devices,
                env=variables,
                fresh=fresh,
            )
            for index in range(count)
        ]
        self.processes = [started.process for started in self._started]

    def kill(self, index: int) -> None:
        """SIGKILL."""
        self.processes[index].kill()

    def output(self, index: int) -> tuple[str, str]:
        """What a process has written to stdout and stderr so far."""
        return self._started[index].output()

    def reports(self, index: int) -> list[Any]:
        """The JSON objects that a process has printed so far, each on a line."""
        lines = self.output(index)[0].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait(self) -> list[int]:
        """Exit codes, once all have ended."""
        return [process.wait(self._timeout_secs) for process in self.processes]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()  # all at once, before one is waited for
        for started in self._started:
            started.__exit__(*exc)


def run_processes(source: str, count: int, *args: str, **kwargs: Any) -> list[list[Any]]:
    """What each process of a program has reported; all must succeed."""
    with Running(source, count, *args, **kwargs) as running:
        codes = running.wait()
        if any(codes):
            told = [
                f"--- process {index}: exit {code}\n{out}{err[-3000:]}"
                for index, code in enumerate(codes)
                for out, err in [running.output(index)]
            ]
            raise AssertionError("\n".join(told))
        return [running.reports(index) for index in range(count)]


def environment(devices: int | None, env: Mapping[str, str]) -> dict[str, str]:
    """This one, for a program with that many devices, or with those that it asks for itself."""
    path = [*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH")]
    variables = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **env,
    }
    if devices is None:
        del variables["XLA_FLAGS"]
    return variables


def run_python(
    source: str,
    *args: str,
    devices: int = 8,
    check: bool = True,
    env: Mapping[str, str] = {},
    timeout_secs: float = 240,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own; ``tests`` is importable there, and this package.

    See :class:`Started` for the arguments.
    """
    arguments = ("-c", textwrap.dedent(source), *args)
    result = Started(*arguments, devices=devices, env=env, fresh=fresh).result(timeout_secs)
    if check and result.returncode != 0:
        raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr[-4000:]}")
    return result
