"""A training program in each of the four styles, run in processes of its own by test_resume.py.

Prints one JSON object: a digest of every part of the final state, and what each step saw.

    python resume_program.py STYLE DIRECTORY FIRST LAST SEED [LAYOUT-SNAPSHOT ...]

trains up to step LAST; from FIRST on it resumes from DIRECTORY. DIRECTORY "-" trains without a
checkpointer. With layouts and snapshot modes (``flat-copy``) it keeps one directory of that name
for each under DIRECTORY: one run from the start fills all of them, and then each is resumed from,
one after the other; then a list is printed.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import torch
import torchax
from support.strategies import fingerprint
from support.training import fsdp_mesh, fsdp_rule
from torchax import interop, train
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend

BATCH, EXAMPLES = 8, 40  # five batches an epoch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.drop = torch.nn.Dropout(0.25)
        self.out = torch.nn.Linear(16, 8)
        self.out.weight = torch.nn.Parameter(torch.randn(8, 16))
        self.register_buffer("temperature", torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.tanh(self.norm(self.hidden(x))))
        return self.out(h) * self.temperature


class Examples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        data = np.random.default_rng(7)
        self.x = data.standard_normal((EXAMPLES, 8)).astype(np.float32)
        self.y = data.integers(0, 8, EXAMPLES).astype(np.int32)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[int, np.ndarray, np.ndarray]:
        return i, self.x[i], self.y[i]


def batches(loader: Any) -> Iterator[Any]:
    while True:  # a loader that was saved at the end of an epoch first yields an empty one
        yield from loader


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, y)


class Together:
    """Several checkpointers in one run, saving the same steps at the same time."""

    def __init__(self, checkpointers: list[TorchaxCheckpointer]) -> None:
        self._all = checkpointers

    def attach(self, *args: Any, **kwargs: Any) -> int:
        (start,) = {ckpt.attach(*args, **kwargs) for ckpt in self._all}
        return start

    def save(self, *args: Any, **kwargs: Any) -> None:
        for ckpt in self._all:
            ckpt.save(*args, **kwargs)

    def close(self) -> None:
        for ckpt in self._all:
            ckpt.close()


def checkpointer(directory: str, way: str, **policy: Any) -> TorchaxCheckpointer:
    """One that stores in this layout, from snapshots of this mode."""
    layout, snapshot = way.split("-")
    options = CheckpointOptions(layout=layout, snapshot=snapshot)  # type: ignore[arg-type]
    return TorchaxCheckpointer(f"{directory}/{way}", options=options, **policy)


def main(style: str, directory: str, first: int, last: int, seed: int, *ways: str) -> None:
    result: Any
    if directory == "-":
        result = run(style, None, first, last, seed)
    elif not ways:
        result = run(style, TorchaxCheckpointer(directory), first, last, seed)
    elif not first:
        several = Together([checkpointer(directory, way) for way in ways])
        result = run(style, several, first, last, seed)
    else:
        policy = policies.FixedIntervalPolicy(last)
        each = (checkpointer(directory, way, save_decision_policy=policy) for way in ways)
        result = [run(style, ckpt, first, last, seed) for ckpt in each]
    print(json.dumps(result))


def run(style: str, ckpt: Any, first: int, last: int, seed: int) -> Any:
    """Trains with fresh objects and this seed."""
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    torchax.enable_globally()
    env = torchax.default_env()
    if seed % 2:
        env.manual_seed(seed)  # a raw key; else the typed one
    net = Net().to("jax")
    if style == "d":
        rule = fsdp_rule(fsdp_mesh())
        for name, tensor in net.state_dict(keep_vars=True).items():
            torchax_backend.set_buffer(
                tensor, jax.device_put(torchax_backend.buffer(tensor), rule(name, tensor))
            )
    loader = StatefulDataLoader(Examples(), BATCH, shuffle=True)
    seen: list[Any] = []
    train_style = {"a": style_a, "b": style_b, "c": style_c, "d": style_a}[style]
    state = train_style(net, loader, ckpt, first, last, seen)
    state["rng"] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"],
        "python": np.array(random.getstate()[1]),
        "torchax": env.prng_key,
    }
    if ckpt is not None:
        ckpt.close()
    parts = {name: repr(fingerprint(part)).encode() for name, part in state.items()}
    digests = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
    return {"state": digests, "seen": seen}


def delete(donated: Any) -> None:
    """Makes sure that donated buffers are gone: on CPU, one that numpy looks at is not donated."""
    for leaf in jax.tree.leaves(interop.jax_view(donated)):
        if not leaf.is_deleted():
            leaf.delete()


def draw(batch: Any, seen: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch with noise from all four generators; notes what was seen."""
    index, x, y = batch
    noise = np.float32(np.random.random() + random.random() + float(torch.rand(())))
    seen.append([index.tolist(), float(noise)])
    env = torchax.default_env()
    with torchax_backend.native_torch():
        y = y.long()
    x, y = env.to_xla((x, y))
    return x + torch.randn(x.shape, device="jax") * 0.1 + float(noise), y


def fresh_key() -> jax.Array:
    """A key for the dropout of one jitted step, as raw key data."""
    key = torchax.default_env().get_and_rotate_prng_key()
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if typed else key


def forward(net: Any, params: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
    """The module on these parameters, its dropout drawn from this key."""
    with torchax.default_env().override_property(prng=interop.jax_view(key)):
        return torch.func.functional_call(net, params, (x,))


def style_a(net: Any, loader: Any, ckpt: Any, first: int, last: int, seen: list[Any]) -> Any:
    """Jitted value_and_grad, torch.optim stepped eagerly."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor, key: Any) -> torch.Tensor:
        return loss_of(forward(net, params, x, key), y)

    gradients = interop.jax_jit(interop.jax_value_and_grad(loss))
    if ckpt is not None:
        start = ckpt.attach(net, optimizer, lr_scheduler=scheduler, dataloader=loader)
        assert start == first
    data = batches(loader)
    for step in range(first + 1, last + 1):
        x, y = draw(next(data), seen)
        key = interop.torch_view(fresh_key())
        value, grads = gradients(dict(net.named_parameters()), x, y, key)
        for name, parameter in net.named_parameters():
            parameter.grad = grads[name]
        optimizer.step()
        scheduler.step()
        if ckpt is not None:
            ckpt.save(step, metrics={"loss": value}, force=step == last)
    moments = {n: dict(optimizer.state[p]) for n, p in net.named_parameters()}
    return {
        "model": dict(net.state_dict()),
        "moments": moments,
        "lr": optimizer.param_groups[0]["lr"],
        "scheduler": scheduler.state_dict(),
    }


def style_b(net: Any, loader: Any, ckpt: Any, first: int, last: int, seen: list[Any]) -> Any:
    """optax through JittableModule, the state functional and donated."""
    module = interop.JittableModule(net)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def model_fn(weights: Any, buffers: Any, args: Any) -> Any:
        x, key = args
        with torchax.default_env().override_property(prng=interop.jax_view(key)):
            return module.functional_call("forward", weights, buffers, x)

    step_fn = interop.jax_jit(
        train.make_train_step(model_fn, loss_of, optimizer),
        kwargs_for_jax_jit={"donate_argnums": (0, 2)},
    )
    weights, buffers = module.params, module.buffers
    opt_state = interop.call_jax(optimizer.init, weights)
    state = {"weights": weights, "opt_state": opt_state, "buffers": buffers}
    if ckpt is not None:
        assert ckpt.attach(module, dataloader=loader) == first
        if first:
            state = ckpt.load(abstract_state=state)
    data = batches(loader)
    for step in range(first + 1, last + 1):
        x, y = draw(next(data), seen)
        value, weights, opt_state = step_fn(
            state["weights"],
            state["buffers"],
            state["opt_state"],
            (x, interop.torch_view(fresh_key())),
            y,
        )
        delete((state["weights"], state["opt_state"]))
        state = {"weights": weights, "opt_state": opt_state, "buffers": state["buffers"]}
        if ckpt is not None:
            ckpt.save(step, state=state, metrics={"loss": value}, force=step == last)
    return {"state": state}


def style_c(net: Any, loader: Any, ckpt: Any, first: int, last: int, seen: list[Any]) -> Any:
    """The whole torch.optim step inside jax.jit, with a capturable optimizer."""
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=torch.tensor(1e-2, device="jax"), capturable=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    names = [n for n, _ in net.named_parameters()]
    parameters = [p for _, p in net.named_parameters()]
    if ckpt is not None:
        start = ckpt.attach(net, optimizer, lr_scheduler=scheduler, dataloader=loader)
        assert start == first

    def tensors() -> list[Any]:
        moments = [t for p in parameters for _, t in sorted(optimizer.state[p].items())]
        return [*parameters, *moments]

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor, key: Any) -> torch.Tensor:
        return loss_of(forward(net, params, x, key), y)

    def step_fn(lr: Any, arrays: Any, x: Any, y: Any, key: Any) -> Any:
        live = tensors()
        before = [torchax_backend.buffer(t) for t in live]
        for tensor, array in zip(live, arrays, strict=True):
            torchax_backend.set_buffer(tensor, array)
        torchax_backend.set_buffer(optimizer.param_groups[0]["lr"], lr)
        value, grads = interop.jax_value_and_grad(loss)(
            dict(zip(names, parameters, strict=True)), *interop.torch_view((x, y, key))
        )
        for name, parameter in zip(names, parameters, strict=True):
            parameter.grad = grads[name]
        optimizer.step()
        after = [torchax_backend.buffer(t) for t in tensors()]
        for tensor, array in zip(live, before, strict=True):
            torchax_backend.set_buffer(tensor, array)
        return interop.jax_view(value), after

    jitted = jax.jit(step_fn, donate_argnums=1)
    if not any(optimizer.state[p] for p in parameters):
        for p in parameters:  # as capturable AdamW makes it at its first step
            optimizer.state[p].update(
                step=torch.zeros((), device="jax"),
                exp_avg=torch.zeros_like(p),
                exp_avg_sq=torch.zeros_like(p),
            )
    data = batches(loader)
    for step in range(first + 1, last + 1):
        x, y = draw(next(data), seen)
        live = tensors()
        lr = optimizer.param_groups[0]["lr"]
        kept = torchax_backend.buffer(lr)
        inputs = (torchax_backend.buffer(x), torchax_backend.buffer(y), fresh_key())
        donated = [torchax_backend.buffer(t) for t in live]
        value, arrays = jitted(kept, donated, *inputs)
        delete(donated)
        for tensor, array in zip(live, arrays, strict=True):
            torchax_backend.set_buffer(tensor, array)
        torchax_backend.set_buffer(lr, kept)
        scheduler.step()
        if ckpt is not None:
            ckpt.save(step, metrics={"loss": value}, force=step == last)
    return {
        "model": dict(net.state_dict()),
        "moments": {n: dict(optimizer.state[p]) for n, p in zip(names, parameters, strict=True)},
        "lr": optimizer.param_groups[0]["lr"],
        "scheduler": scheduler.state_dict(),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(a) for a in sys.argv[3:6]), *sys.argv[6:])  # type: ignore[arg-type]
