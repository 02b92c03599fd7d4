"""Trains a classifier of handwritten digits, and survives being killed at any moment.

    python examples/train_digits.py --directory runs/digits
    python examples/train_digits.py --check-topology v5e:2x4    # compiles for a TPU, without TPUs

Kill it (or let it kill itself: ``--crash-at 150``) and run the same command again. The run resumes
from the newest checkpoint and ends with the same bits as an uninterrupted run.

The data are the 1,797 digits of 8x8 pixels that ship with scikit-learn. A jitted
``value_and_grad`` computes the gradients, and a torch optimizer steps eagerly. The run also keeps
an average of the weights, which is saved and restored like everything else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
import torchax
from jax.sharding import SingleDeviceSharding
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Sampler
from torchax import interop
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import step_on_topology, topology

Batch = tuple[torch.Tensor, torch.Tensor]
NUM_TEST_IMAGES, BATCH = 360, 64


def classifier() -> nn.Module:
    """Three linear layers, with dropout so that the random state matters."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def digits() -> tuple[list[Any], Batch]:
    """Returns training examples and one test batch: images [N, 64] fp32, labels [N] int32."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:NUM_TEST_IMAGES], order[NUM_TEST_IMAGES:]
    examples = list(zip(images[train], labels[train], strict=True))
    return examples, to_jax(images[test], labels[test])


def to_jax(images: np.ndarray, labels: np.ndarray) -> Batch:
    env = torchax.default_env()
    return env.to_xla((torch.from_numpy(images), torch.from_numpy(labels)))


def collate(examples: list[tuple[np.ndarray, np.int32]]) -> Batch:
    images, labels = zip(*examples, strict=True)
    return to_jax(np.stack(images), np.stack(labels))


class Shuffled(Sampler[int]):
    """Draws a new order for each epoch, which a StatefulDataLoader saves and restores.

    With ``shuffle=True`` every epoch would have the same order, because torchax's ``randperm``
    starts from the generator's initial seed at each call.
    """

    def __init__(self, num_examples: int, seed: int) -> None:
        self.num_examples = num_examples
        self.seed = seed
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


def batches(loader: StatefulDataLoader) -> Iterator[Batch]:
    """Yields batches without end, epoch after epoch.

    A loader restored at the last batch of an epoch first yields an empty epoch. This generator
    counts no epochs, so the next epoch simply follows.
    """
    while True:
        yield from loader


class WeightAverage:
    """An exponential moving average of a model's parameters, on the devices of the model.

    Attributes:
      weights: name -> average, a torchax tensor with the parameter's shape, dtype and sharding.
    """

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        def averaged(old: Any, new: Any) -> Any:
            return {name: old[name] * decay + new[name] * (1 - decay) for name in old}

        self.model = model
        # New tensors around the arrays of the parameters, which JAX never changes.
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        # Donates nothing, because a save in flight may still read the old averages.
        self.averaged = interop.jax_jit(averaged)

    def update(self) -> None:
        """Takes the present parameters into the average."""
        self.weights = self.averaged(self.weights, dict(self.model.named_parameters()))

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights = state_dict


def digest(state: Any) -> str:
    """Returns a hash of every name and every bit of a tree of tensors and numbers."""
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        value = np.asarray(leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)
        hashed.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape} ".encode())
        hashed.update(value.tobytes())
    return f"sha256:{hashed.hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/digits", help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=400, help="total number of optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of a new run; unused on resume")
    parser.add_argument("--crash-at", type=int, metavar="N", help="die (SIGKILL) after step N")
    parser.add_argument(
        "--check-topology",
        metavar="NAME",
        help="do not train, but compile for a chip of a TPU topology, such as v5e:2x4, and print "
        "what step and saves need there; needs libtpu, but no TPU",
    )
    args = parser.parse_args()
    # Otherwise a SIGKILL would lose the buffered lines.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.check_topology:
        jax.config.update("jax_platforms", "cpu")  # TPUs of this machine stay free.

    torchax.enable_globally()
    env = torchax.default_env()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)  # torchax has a random key of its own:
    env.manual_seed(args.seed)

    examples, (test_images, test_labels) = digits()
    loader = StatefulDataLoader(
        examples,
        batch_size=BATCH,
        sampler=Shuffled(len(examples), args.seed),
        collate_fn=collate,
        drop_last=True,  # All batches then have one shape, for which XLA compiles once.
        # Workers (num_workers=2) must not compute through torchax, which would hang in them:
        # worker_init_fn=lambda worker: torchax.disable_globally(),
    )
    model = classifier().to("jax")
    # Created after .to("jax"), which replaces the parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
    average = WeightAverage(model)

    def loss_fn(params: Any, key: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
        # The key is an argument, because a key that torchax drew while tracing would be a constant
        # of the compiled step: each step would use the same dropout mask until a restart.
        with env.override_property(prng=key.jax()):
            logits = torch.func.functional_call(model, params, (images,))
        return nn.functional.cross_entropy(logits, labels)

    value_and_grad = interop.jax_jit(interop.jax_value_and_grad(loss_fn))

    if args.check_topology:
        chip = SingleDeviceSharding(topology.devices(args.check_topology)[0])
        key = interop.torch_view(env.prng_key)
        # The chip holds no arrays, so abstract arrays stand for them.
        params, *inputs = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=chip),
            interop.jax_view((dict(model.named_parameters()), key, *collate(examples[:BATCH]))),
        )
        # Momentum and averages have the parameters' shapes.
        state = {"model": params, "optimizer": params, "average": params}
        print(step_on_topology(args.check_topology, value_and_grad, params, *inputs, state=state))
        return

    with TorchaxCheckpointer(args.directory) as ckpt:
        start = ckpt.attach(
            model,
            optimizer,
            lr_scheduler=scheduler,
            dataloader=loader,
            stateful={"average": average},
        )
        print(f"resumed: step {start}" if start else "started: no checkpoint")
        stream = batches(loader)
        steps = ckpt.steps(args.steps)
        # disable=None shows the bar only on a terminal.
        for step in tqdm(steps, initial=start, total=args.steps, unit="step", disable=None):
            images, labels = next(stream)
            # Part of the random state that each checkpoint saves.
            key = interop.torch_view(env.get_and_rotate_prng_key())
            loss, grads = value_and_grad(dict(model.named_parameters()), key, images, labels)
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]
            optimizer.step()
            scheduler.step()
            average.update()
            ckpt.record(loss=loss)
            if step % 50 == 0 or step == args.steps:
                tqdm.write(f"step {step}: loss {loss.item():.4f}")
            if step == args.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if ckpt.reached_preemption():
        print(f"preempted: saved step {ckpt.latest_step()}")
    ckpt.exit_if_preempted()  # With an error code, so that the scheduler restarts the job.

    model.eval()
    logits = torch.func.functional_call(model, average.weights, (test_images,))
    accuracy = (logits.argmax(dim=1) == test_labels).float().mean().item()
    print(f"test accuracy: {accuracy:.1%}")
    final = model.state_dict(), optimizer.state_dict(), average.state_dict()
    print(f"final state: {digest(final)}")
    print(f"saved: step {ckpt.latest_step()} in {ckpt.directory}")


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        sys.exit(f"--check-topology: {error}")
