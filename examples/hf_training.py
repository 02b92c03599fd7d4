"""What the examples of transformers share: arguments, batches and the training step."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Without an accelerator, JAX simulates eight CPU devices. It reads this when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import small_llama
import torch
import torchax
import torchax.train
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.nn import functional
from torch.utils.data import Sampler
from torchax import interop
from torchax.ops import mappings
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import shardings
from torchax_ckpt.planning import step_on_topology, topology

CONTEXT, BATCH = 64, 16
Tensors = dict[str, Any]
Rule = Callable[[str, Any], NamedSharding]


def arguments(doc: str, directory: str) -> tuple[argparse.Namespace, Mesh]:
    """Returns the arguments of the command line, and a mesh of the devices to train on."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--directory", default=directory, help="directory of the checkpoints")
    parser.add_argument("--model", type=Path, help="folder of a model; default: makes a small one")
    on = parser.add_mutually_exclusive_group()
    on.add_argument("--devices", type=int, default=8, help="number of devices to train on")
    on.add_argument(
        "--check-topology",
        metavar="NAME",
        help="do not train, but compile for the chips of a TPU topology, such as v5e:2x4, and "
        "print what step and saves need there; needs libtpu, but no TPU",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that load batches")
    parser.add_argument("--steps", type=int, default=200, help="total number of optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of a new run; unused on resume")
    parser.add_argument("--crash-at", type=int, metavar="N", help="die (SIGKILL) after step N")
    args = parser.parse_args()
    # Otherwise a SIGKILL would lose the buffered lines.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Steps that overlap can wait for one another without end, if few cores simulate many devices.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if args.check_topology:
        jax.config.update("jax_platforms", "cpu")  # TPUs of this machine stay free.
        devices = list(topology.devices(args.check_topology))
    else:
        devices = jax.devices()[: args.devices]
    if BATCH % len(devices):
        parser.error(f"expected a divisor of the batch size {BATCH}, found {len(devices)} devices")
    # Not jax.make_mesh: torchax's operations do not accept the type of its axes.
    return args, Mesh(np.array(devices), ("fsdp",))


# --- batches -----------------------------------------------------------------------------------


class Shuffled(Sampler[int]):
    """Draws a new order for each epoch, which a StatefulDataLoader saves and restores."""

    def __init__(self, num_examples: int, seed: int) -> None:
        self.num_examples, self.seed = num_examples, seed
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_examples)
        for index in order[self.position :].tolist():
            self.position += 1
            yield index
        self.epoch, self.position = self.epoch + 1, 0

    def __len__(self) -> int:
        return self.num_examples

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        vars(self).update(state_dict)


def text_loader(tokenizer: Any, args: argparse.Namespace) -> StatefulDataLoader:
    """Returns a loader of blocks of text, int32 [BATCH, CONTEXT + 1]."""
    examples = small_llama.blocks(tokenizer, CONTEXT + 1)
    return StatefulDataLoader(
        examples,
        batch_size=BATCH,
        sampler=Shuffled(len(examples), args.seed),
        collate_fn=np.stack,
        drop_last=True,  # All batches then have one shape, for which XLA compiles once.
        num_workers=args.workers,
        # Workers that compute through torchax hang or fail.
        worker_init_fn=lambda worker: torchax.disable_globally(),
    )


def batches(loader: StatefulDataLoader, mesh: Mesh) -> Iterator[tuple[Any, Any]]:
    """Yields tokens and targets without end, epoch after epoch, sharded over the devices."""
    by_example = NamedSharding(mesh, PartitionSpec("fsdp"))
    while True:
        for block in loader:
            yield interop.torch_view(jax.device_put((block[:, :-1], block[:, 1:]), by_example))


# --- the training step -------------------------------------------------------------------------


class OptaxState:
    """The state of an optax optimizer, as an object that a checkpointer saves and restores."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(self.state))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        leaves = [state_dict[str(i)] for i in range(len(state_dict))]
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)


def split(model: torch.nn.Module) -> tuple[Tensors, Tensors]:
    """Returns the parameters that are trained, and all other tensors of the model."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    return trained, {name: tensor for name, tensor in tensors.items() if name not in trained}


def put_back(model: torch.nn.Module, params: Tensors) -> None:
    """Makes tensors the model's own, in place of those that a step has donated."""
    with torch.no_grad():
        for name, tensor in params.items():
            model.get_parameter(name).copy_(tensor)


def abstract(tensors: Tensors, rule: Rule) -> Tensors:
    """Returns abstract arrays for tensors, which may be on the meta device."""
    return {
        name: jax.ShapeDtypeStruct(t.shape, mappings.t2j_dtype(t.dtype), sharding=rule(name, t))
        for name, t in tensors.items()
    }


def training_step(model: torch.nn.Module, optimizer: Any, rule: Rule) -> tuple[Any, Any, Any]:
    """Returns a jitted step, and the abstract parameters and optimizer state that it trains.

    The step maps (params, frozen, optimizer's state, (tokens, key), targets) to (loss, params,
    optimizer's state). It donates what it returns anew, and does not return what is frozen.
    """

    def forward(params: Any, frozen: Any, inputs: tuple[Any, Any]) -> Any:
        tokens, key = inputs
        # The key is an argument, because a key that torchax drew while tracing would be a constant
        # of the compiled step: each step would use the same dropout mask until a restart.
        with torchax.default_env().override_property(prng=key.jax()):
            inputs_of_model = {"input_ids": tokens, "use_cache": False}
            called = torch.func.functional_call(model, {**params, **frozen}, kwargs=inputs_of_model)
        return called.logits

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.float().reshape(-1, logits.shape[-1])
        return functional.cross_entropy(logits, targets.reshape(-1))

    params = abstract(split(model)[0], rule)
    opt_state = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rule("", a)),
        jax.eval_shape(optimizer.init, params),
    )
    where = jax.tree.map(lambda a: a.sharding, (params, opt_state))
    step = interop.jax_jit(
        torchax.train.make_train_step(forward, loss_fn, optimizer),
        # Without out_shardings, the compiler could choose other shardings for the new state.
        {"donate_argnums": (0, 2), "out_shardings": (None, *where)},
    )
    return step, params, opt_state


def first_state(optimizer: Any, params: Any, opt_state: Any) -> OptaxState:
    """Returns the optimizer's state before the first step, with the shardings of ``opt_state``."""
    init = jax.jit(
        lambda: optimizer.init({n: jnp.zeros(a.shape, a.dtype) for n, a in params.items()}),
        out_shardings=jax.tree.map(lambda a: a.sharding, opt_state),
    )
    return OptaxState(interop.torch_view(init()))


def check(name: str, model: torch.nn.Module, optimizer: Any, mesh: Mesh) -> None:
    """Compiles the step for the chips of a TPU topology, and prints what they need."""
    rule = shardings.fsdp(mesh)
    step, params, opt_state = training_step(model, optimizer, rule)
    frozen = abstract(split(model)[1], rule)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    tokens = jax.ShapeDtypeStruct((BATCH, CONTEXT), np.int32, sharding=sharding)
    key = jax.ShapeDtypeStruct((2,), np.uint32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = {"params": params, "frozen": frozen, "opt_state": opt_state}
    print(
        step_on_topology(name, step, params, frozen, opt_state, (tokens, key), tokens, state=state)
    )


def digest(state: Any) -> str:
    """Returns a hash of every name and every bit of a tree of tensors, in any sharding."""
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        value = np.asarray(leaf.jax())
        hashed.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape} ".encode())
        hashed.update(value.tobytes())
    return f"sha256:{hashed.hexdigest()}"
