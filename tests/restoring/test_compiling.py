"""A step compiled beside a restore: its first call compiles nothing, and uses restored values."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support.compare import assert_trees_identical
from support.processes import run_python
from support.training import P, fsdp_mesh, fsdp_rule, mlp, place
from torchax import interop
from torchax.train import make_train_step

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, compiling, torchax_backend
from torchax_ckpt.errors import CallError, UnsupportedLeafError

_compiled: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _listening() -> None:
    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            _compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the package's warnings so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def count(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """Calls a function; returns how many programs were compiled, and its result as JAX arrays."""
    before = len(_compiled)
    result = jax.block_until_ready(interop.jax_view(function(*arguments)))
    return len(_compiled) - before, result


def model_of(is_sharded: bool) -> torch.nn.Module:
    model = mlp()
    if is_sharded:
        place(model, fsdp_rule(fsdp_mesh(2)))
    return model


X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


def eager(ckpt: TorchaxCheckpointer, model: torch.nn.Module, block: Callable[..., Any]) -> Any:
    """Jitted gradients of a module that is restored in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    params, x = dict(model.named_parameters()), torch.tensor(X).to("jax")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(model, params, (x,)) ** 2).mean()

    step = interop.jax_jit(interop.jax_value_and_grad(loss))
    with block(step, params, x):
        start = ckpt.attach(model, optimizer)
    called = count(step, params, x)
    if not start:
        for name, parameter in params.items():
            parameter.grad = torchax_backend.wrap(called[1][1][name])
        optimizer.step()
        ckpt.save(1, force=True)
    return called


def donated(ckpt: TorchaxCheckpointer, model: torch.nn.Module, block: Callable[..., Any]) -> Any:
    """torchax's train step, jitted by torchax and donated; its state is functional."""
    wrapped, adam = interop.JittableModule(model), optax.adam(1e-2)

    def forward(weights: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return wrapped.functional_call("forward", weights, buffers, x)

    loss = lambda output, label: ((output - label) ** 2).mean()  # noqa: E731
    step = interop.jax_jit(make_train_step(forward, loss, adam), {"donate_argnums": (0, 2)})
    params = dict(wrapped.params)
    # JAX would compile a program that moves a batch from the default device to those of a mesh.
    home = next(iter(params.values())).jax().sharding
    place_of = getattr(home, "mesh", None) and jax.sharding.NamedSharding(home.mesh, P())
    x, label = map(torchax_backend.wrap, jax.device_put((X, X[:, :4]), place_of))
    state = {"params": params, "opt": interop.call_jax(adam.init, params)}
    with block(step, state["params"], wrapped.buffers, state["opt"], x, label):
        start = ckpt.attach()
        state = ckpt.load(start, abstract_state=state) if start else state
    called = count(step, state["params"], wrapped.buffers, state["opt"], x, label)
    if not start:
        ckpt.save(1, state=dict(zip(state, called[1][1:], strict=True)), force=True)
    return called


def functional(ckpt: TorchaxCheckpointer, model: torch.nn.Module, block: Callable[..., Any]) -> Any:
    """A jitted and donated step of JAX alone, whose state has a number of a weak type too."""
    adam = optax.adam(1e-2)
    params = {name: jnp.array(p) for name, p in interop.jax_view(model.state_dict()).items()}
    state = {"params": params, "opt": adam.init(params), "scale": jnp.asarray(2.0) * 1}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: ((x @ p["0.weight"].T) ** 2).sum())(state["params"])
        updates, opt = adam.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "scale": state["scale"] * 2}

    with block(step, state, X):
        start = ckpt.attach()
        state = ckpt.load(start, abstract_state=state) if start else state
    called = count(step, state, X)
    if not start:
        ckpt.save(1, state=called[1], force=True)
    return called


@pytest.mark.parametrize(
    ("style", "is_sharded"),
    [
        pytest.param(eager, False, id="eager-one-device"),
        pytest.param(eager, True, id="eager-two-devices", marks=pytest.mark.slow),
        pytest.param(donated, False, id="donated-one-device", marks=pytest.mark.slow),
        pytest.param(donated, True, id="donated-two-devices"),
        pytest.param(functional, False, id="functional-one-device", marks=pytest.mark.slow),
        pytest.param(functional, True, id="functional-two-devices"),
    ],
)
def test_the_first_call_compiles_nothing(
    style: Callable[..., Any], is_sharded: bool, directory: Path, logged: Any
) -> None:
    def run(block: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        with TorchaxCheckpointer(directory) as ckpt:
            return style(ckpt, model_of(is_sharded), block)

    fresh, _ = run(compiling)
    resumed, result = run(compiling)
    otherwise, expected = run(lambda *_: jax.named_scope("nothing"))
    assert (fresh, resumed) == (0, 0)
    assert otherwise > 0
    assert_trees_identical(result, expected)
    assert logged() == []


class Scaled(torch.nn.Module):
    """A module with a buffer and a number that its step does not take as arguments."""

    def __init__(self, buffer: float, number: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((2,), buffer))
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale * self.number


class Number:
    """Stores the number of a module."""

    def __init__(self, module: Scaled) -> None:
        self.module = module

    def state_dict(self) -> dict[str, float]:
        return {"number": self.module.number}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.module.number = state["number"]


@pytest.mark.parametrize(
    ("buffer", "number", "changed"),
    [
        (3.0, 2.0, None),
        (1.0, 2.0, "the array float32[2] in the step has changed"),
        (3.0, 1.0, "the value 1.0 in the step has changed"),
    ],
)
@pytest.mark.parametrize("in_budget", [False, True])
def test_what_the_step_does_not_take_as_an_argument_is_the_restored_one(
    buffer: float, number: float, changed: str | None, in_budget: bool, directory: Path, logged: Any
) -> None:
    options = CheckpointOptions(restore_in_budget=in_budget)

    def run(buffer: float, number: float) -> Any:
        model = Scaled(buffer, number).to("jax")
        params, x = dict(model.named_parameters()), torch.tensor(X).to("jax")
        step = interop.jax_jit(lambda p, x: torch.func.functional_call(model, p, (x,)))
        with TorchaxCheckpointer(directory, options=options) as ckpt:
            with compiling(step, params, x):
                start = ckpt.attach(model, stateful={"number": Number(model)})
            called = count(step, params, x)
            if not start:
                ckpt.save(1, force=True)
        return called

    _, expected = run(3.0, 2.0)
    assert logged() == []
    num_compiled, result = run(buffer, number)
    assert_trees_identical(result, expected)
    assert (num_compiled > 0) == (changed is not None)
    assert [str(changed) in text for text in logged()] == ([] if changed is None else [True])


Step = Callable[[jax.Array], jax.Array]


def checkpointed_gradient(loss: Step) -> Step:
    checkpointed = jax.checkpoint(loss)
    return lambda x: jax.grad(checkpointed)(x).sum()


def jitted_gradient(loss: Step) -> Step:
    inner = jax.jit(loss)
    return lambda x: jax.grad(inner)(x).sum()


def scanned(loss: Step) -> Step:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return carry + loss(x), None

    return lambda x: jax.lax.scan(body, jnp.zeros(()), x[None])[0]


def looped(loss: Step) -> Step:
    body = lambda _, x: x * 0 + loss(x)  # noqa: E731
    return lambda x: jax.lax.fori_loop(0, 2, body, x).sum()


# Functions of which JAX keeps traces, so that it traces them once for many traces of a step.
KEPT: dict[str, Callable[[Step], Step]] = {
    "checkpointed": jax.checkpoint,
    "checkpointed gradient": checkpointed_gradient,
    "jitted": jax.jit,
    "jitted gradient": jitted_gradient,
    "scanned": scanned,
    "looped": looped,
    "chosen": lambda loss: lambda x: jax.lax.cond(x[0] > 0, loss, jnp.sum, x),
}


@pytest.mark.parametrize("kind", [np.full, jnp.full, lambda _, value: value])
@pytest.mark.parametrize("name", KEPT)
def test_functions_that_the_step_calls_use_restored_values(
    name: str, kind: Callable[..., Any], logged: Any
) -> None:
    x = jnp.arange(1.0, 9.0)
    held = {"scale": kind(8, 2.0)}
    inner = KEPT[name](lambda x: (x * x * held["scale"]).sum())
    step = jax.jit(lambda x: inner(x) + 1)
    with compiling(step, x):
        held["scale"] = kind(8, 2.0)  # as it was
    assert count(step, x)[0] == 0
    assert logged() == []
    step = jax.jit(lambda x: inner(x) + 2)
    with compiling(step, x):
        held["scale"] = kind(8, 3.0)
    fresh = KEPT[name](lambda x: (x * x * held["scale"]).sum())
    assert_trees_identical(count(step, x)[1], jax.jit(lambda x: fresh(x) + 2)(x))
    assert ["has changed since it was compiled" in text for text in logged()] == [True]


def test_after_a_block_that_fails_the_step_uses_what_it_has_restored() -> None:
    held = {"scale": jnp.ones(8)}
    step = jax.jit(lambda x: (x * held["scale"]).sum())
    with pytest.raises(OSError, match="no data"), compiling(step, held["scale"]):
        held["scale"] = jnp.full(8, 3.0)
        raise OSError("no data")
    assert step(jnp.ones(8)) == 24


REFUSED: dict[str, tuple[Any, str]] = {
    "plain": (lambda x: x, "expected a jitted function, as jax.jit and"),
    "static": (jax.jit(lambda x, n: x * n, static_argnums=1), "without static arguments"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_ahead_is_refused(name: str) -> None:
    step, message = REFUSED[name]
    arguments = (np.ones(8, np.float32), *([3] if name == "static" else []))
    with pytest.raises(CallError) as raised, compiling(step, *arguments):
        pytest.fail("the block ran")
    assert message in str(raised.value)


def test_a_step_that_draws_from_torchaxs_key_is_refused_and_leaves_the_key() -> None:
    key = torchax_backend.prng_key()
    step = interop.jax_jit(lambda x: torch.nn.functional.dropout(x, 0.5))
    with (
        pytest.raises(UnsupportedLeafError, match="random key is a JAX tracer"),
        compiling(step, torch.ones(4, device="jax")),
    ):
        pytest.fail("the block ran")
    assert torchax_backend.prng_key() is key


def test_it_compiles_while_the_block_runs() -> None:
    ended = threading.Event()
    step = jax.jit(lambda x: jnp.cos(x) + 17)

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            ended.set()

    jax.monitoring.register_event_duration_secs_listener(note)
    with compiling(step, jax.ShapeDtypeStruct((3,), np.float32)):
        assert ended.wait(60)
    assert count(step, jax.device_put(np.ones(3, np.float32)))[0] == 0


def test_a_compilation_that_fails_is_logged_once_and_the_restore_stays(
    directory: Path, logged: Any
) -> None:
    model = mlp()
    step = jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True})
    with TorchaxCheckpointer(directory) as ckpt:
        with compiling(step, X):
            assert ckpt.attach(model) == 0
        assert ckpt.save(1, force=True)
    (text,) = logged()
    assert text.startswith("compiling failed, so the first call compiles: ")
    assert "xla_no_such_option" in text


FAILS = """
import jax, jax.numpy as jnp, numpy as np
from torchax_ckpt import compiling

def step(x):
    for i in range(60):
        x = jnp.sin(x @ x.T) @ x + jnp.cos(x * i)
    return x.sum()

with compiling(jax.jit(jax.grad(step)), np.ones((8, 8), np.float32)):
    raise SystemExit(7)
"""


@pytest.mark.slow
def test_a_program_ends_as_it_should_while_a_compilation_runs() -> None:
    assert run_python(FAILS, fresh=True, check=False).returncode == 7
