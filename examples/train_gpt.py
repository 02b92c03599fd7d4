"""Trains a small GPT on Python's own source code, sharded (FSDP), and survives being killed.

    python examples/train_gpt.py --directory runs/gpt
    python examples/train_gpt.py --directory runs/gpt --devices 4    # resumes on half the devices
    python examples/train_gpt.py --check-topology v5e:2x4    # compiles for TPUs, without TPUs

Kill it (or let it kill itself: ``--crash-at 60``) and run the same command again. The run resumes
from the newest checkpoint and ends with the same bits as an uninterrupted run. On another number of
devices the restored state has the same bits, with other shardings.

The training step is jitted and donates its state, so the state is functional: the first step
deletes the buffers that the module was built with, and ``save`` takes the state as an argument.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from typing import Any

# Without an accelerator, JAX simulates eight CPU devices. It reads this when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
import torch
import torchax
import torchax.train
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_gpt import BATCH, CONTEXT, GPT, VOCABULARY, text
from torch.nn import functional
from torchax import interop
from tqdm import tqdm

from torchax_ckpt import TorchaxCheckpointer, shardings
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import step_on_topology, topology


def abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns an abstract array with the shape and the dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def digest(state: Any) -> str:
    """Returns a hash of every name and every bit of a tree of tensors, in any sharding."""
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        value = np.asarray(leaf.jax())
        hashed.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape} ".encode())
        hashed.update(value.tobytes())
    return f"sha256:{hashed.hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/gpt", help="directory of the checkpoints")
    on = parser.add_mutually_exclusive_group()
    on.add_argument("--devices", type=int, default=8, help="number of devices to train on")
    on.add_argument(
        "--check-topology",
        metavar="NAME",
        help="do not train, but compile for the chips of a TPU topology, such as v5e:2x4, and "
        "print what step and saves need there; needs libtpu, but no TPU",
    )
    parser.add_argument("--steps", type=int, default=200, help="total number of optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of a new run; unused on resume")
    parser.add_argument("--crash-at", type=int, metavar="N", help="die (SIGKILL) after step N")
    args = parser.parse_args()
    # Otherwise a SIGKILL would lose the buffered lines.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.check_topology:
        jax.config.update("jax_platforms", "cpu")  # TPUs of this machine stay free.
        devices = list(topology.devices(args.check_topology))
        if BATCH % len(devices):
            parser.error(
                "--check-topology: expected a number of chips that divides the batch size "
                f"{BATCH}; found {args.check_topology} with {len(devices)} chips"
            )
    else:
        devices = jax.devices()[: args.devices]
        if len(devices) < args.devices or BATCH % args.devices:
            parser.error(
                f"--devices: expected at most {len(jax.devices())}, and a divisor of the batch "
                f"size {BATCH}; found {args.devices}"
            )

    torchax.enable_globally()
    env = torchax.default_env()
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)  # torchax has a random key of its own:
    env.manual_seed(args.seed)

    # Not jax.make_mesh: torchax's operations do not accept the type of its axes.
    mesh = Mesh(np.array(devices), ("fsdp",))

    def sharded(tree: Any) -> Any:
        arrays = interop.jax_view(tree)
        where = jax.tree_util.tree_map_with_path(shardings.fsdp(mesh), arrays)
        if args.check_topology:  # Its chips hold no arrays, so abstract arrays stand for them.
            return jax.tree.map(abstract, arrays, where)
        return interop.torch_view(jax.device_put(arrays, where))

    # Otherwise .to() would create new parameters and untie the head from the embedding.
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = interop.JittableModule(GPT().to("jax"))
    params, buffers = sharded(dict(model.params)), sharded(dict(model.buffers))
    optimizer = optax.adamw(3e-3)
    call = jax.eval_shape if args.check_topology else interop.call_jax
    opt_state = sharded(call(optimizer.init, params))

    def forward(params: Any, buffers: Any, inputs: tuple[Any, Any]) -> Any:
        tokens, key = inputs
        # The key is an argument, because a key that torchax drew while tracing would be a constant
        # of the compiled step: each step would use the same dropout mask until a restart.
        with env.override_property(prng=key.jax()):
            return model.functional_call("forward", params, buffers, tokens)

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))

    where = jax.tree.map(lambda a: a.sharding, interop.jax_view((params, opt_state)))
    train_step = interop.jax_jit(
        torchax.train.make_train_step(forward, loss_fn, optimizer),
        {
            "donate_argnums": (0, 2),
            # Without these, the compiler could choose other shardings for the new state.
            "out_shardings": (None, *where),
        },
    )
    by_example = NamedSharding(mesh, PartitionSpec("fsdp"))

    if args.check_topology:
        tokens = abstract(np.zeros((BATCH, CONTEXT), np.int32), by_example)
        key = abstract(env.prng_key, NamedSharding(mesh, PartitionSpec()))
        state = {"params": params, "opt_state": opt_state, "buffers": buffers}
        inputs = (params, buffers, opt_state, (tokens, key), tokens)
        print(step_on_topology(args.check_topology, train_step, *inputs, state=state))
        return

    source = text()
    with TorchaxCheckpointer(args.directory) as ckpt:
        start = ckpt.attach()  # Attaches only the random state; the other state is functional.
        state = {"params": params, "opt_state": opt_state, "buffers": buffers}
        if start:
            state = ckpt.load(start, abstract_state=state)  # With this run's shardings.
        print(f"resumed: step {start}" if start else "started: no checkpoint")
        params, opt_state, buffers = state["params"], state["opt_state"], state["buffers"]
        steps = range(start + 1, args.steps + 1)
        # disable=None shows the bar only on a terminal.
        for step in tqdm(steps, initial=start, total=args.steps, unit="step", disable=None):
            # The batch and the key come from the random state that each checkpoint saves.
            begin = np.random.randint(len(source) - CONTEXT, size=(BATCH, 1))
            window = source[begin + np.arange(CONTEXT + 1)]
            tokens, targets = interop.torch_view(
                jax.device_put((window[:, :-1], window[:, 1:]), by_example)
            )
            key = interop.torch_view(env.get_and_rotate_prng_key())
            loss, params, opt_state = train_step(params, buffers, opt_state, (tokens, key), targets)
            state = {"params": params, "opt_state": opt_state, "buffers": buffers}
            ckpt.save(step, state=state, metrics={"loss": loss}, force=step == args.steps)
            if step % 20 == 0 or step == args.steps:
                tqdm.write(f"step {step}: loss {loss.item():.4f}")
            if step == args.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if ckpt.reached_preemption(step):  # save has waited until this step was durable.
                break

    if ckpt.reached_preemption():
        print(f"preempted: saved step {ckpt.latest_step()}")
    ckpt.exit_if_preempted()  # With an error code, so that the scheduler restarts the job.
    print(f"devices: {args.devices}")
    print(f"final state: {digest(state)}")
    print(f"saved: step {ckpt.latest_step()} in {ckpt.directory}")


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        sys.exit(f"--check-topology: {error}")
