"""Trains with Ray Train on several workers; when one of them dies, all go on from the newest step.

    python examples/ray_train.py --storage /tmp/ray-runs --name first --steps 200 --crash-at 100

On a slice of TPUs, with a worker for each host and a bucket that all of them reach:

    python examples/ray_train.py --storage gs://bucket/ray --name first \\
        --workers 4 --topology 4x4 --accelerator-type TPU-V6E

Started again with the same name, it goes on with the same run. docs/platforms.md says what happens
when Ray or a node stops. Nothing of this has run on a TPU yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer


def train(config: dict[str, Any]) -> None:
    """Runs on each worker, on a thread of Ray's, after Ray has called jax.distributed.initialize.

    It imports JAX itself, so that the driver does not take the TPU of its host.
    """
    import jax
    import numpy as np
    import torch
    import torchax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from torch import nn
    from torchax import interop

    from torchax_ckpt import TorchaxCheckpointer

    context = ray.train.get_context()
    assert jax.process_count() == context.get_world_size()  # else each worker trains by itself
    is_first = context.get_world_rank() == 0
    directory = f"{config['storage']}/{context.get_experiment_name()}/steps"
    torchax.enable_globally()
    torch.manual_seed(0)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    by_row, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    width = config["width"]
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return ((torch.func.functional_call(model, params, (x,)) - x.flip(1)) ** 2).mean()

    loss_and_grads = interop.jax_jit(interop.jax_value_and_grad(loss_fn))

    def batch(step: int) -> Any:
        """The same on every process, which takes of it what its devices need."""
        x = np.random.default_rng(step).normal(size=(config["batch"], width)).astype(np.float32)
        return interop.torch_view(jax.make_array_from_callback(x.shape, by_row, x.__getitem__))

    def report(ckpt: TorchaxCheckpointer, **metrics: Any) -> None:
        """Gives Ray metrics and a file that names the newest durable step; a call of all workers.

        Ray may copy, keep and delete the file. If it were given the step itself, it would delete it
        by its own rules, and not start again once the preservation policy has deleted it.
        """
        newest = ckpt.latest_step("durable") if is_first else None
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if newest is not None:
                pointer = {"path": f"{directory}/{newest}", "step": newest}
                Path(folder, "step.json").write_text(json.dumps(pointer))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({**metrics, "durable_step": newest}, checkpoint=checkpoint)

    with TorchaxCheckpointer(directory) as ckpt:
        start = ckpt.attach(model, optimizer, shardings=lambda name, abstract: by_row)
        is_announced = False
        for step in ckpt.steps(config["steps"]):
            loss, grads = loss_and_grads(dict(model.named_parameters()), batch(step))
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]
            optimizer.step()
            ckpt.record(loss=loss)
            if step % config["report_every"] == 0:
                # The answer is the same on all workers. They train on until Ray stops them: a
                # function that returns has finished its run.
                if not is_announced and ray.train.get_preemption_info() is not None:
                    is_announced = True
                    ckpt.save(step, force=True)
                    ckpt.wait_until_finished()
                report(ckpt, step=step, started_from=start, loss=loss.item())
            if step == config["crash_at"] and not start and not is_first:
                ckpt.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)
    if ckpt.reached_preemption():  # a SIGTERM to a worker; JAX tells all of them
        raise RuntimeError("preempted: an error, so that Ray starts the workers again")
    final = hashlib.sha256()
    for parameter in model.parameters():
        array = jax.jit(lambda x: x, out_shardings=whole)(parameter.jax())  # type: ignore[attr-defined]
        final.update(np.asarray(array.addressable_data(0)).tobytes())
    report(ckpt, step=config["steps"], started_from=start, final_state=final.hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--storage", required=True, help="shared by all nodes: gs://bucket/ray")
    parser.add_argument("--name", required=True, help="of the run: saves to STORAGE/NAME/steps")
    parser.add_argument("--workers", type=int, default=2, help="0: in this process, without Ray's")
    parser.add_argument("--topology", help="chips of the TPU slices, 4x4; default: CPUs")
    parser.add_argument("--accelerator-type", help="kind of TPU: TPU-V6E")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps in all")
    parser.add_argument("--report-every", type=int, default=10, help="steps between reports to Ray")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="over all devices")
    parser.add_argument(
        "--crash-at", type=int, metavar="N", help="worker 1 dies after step N, once"
    )
    args = parser.parse_args()
    result = JaxTrainer(
        train,
        train_loop_config=vars(args),
        # On CPUs too: it has Ray connect the workers, through a new address and port each time.
        jax_config=JaxConfig(use_tpu=True),
        scaling_config=ScalingConfig(
            num_workers=args.workers,
            use_tpu=args.topology is not None,
            topology=args.topology,
            accelerator_type=args.accelerator_type,
        ),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            checkpoint_config=CheckpointConfig(num_to_keep=3),  # of the small files
            failure_config=FailureConfig(max_failures=10),
            worker_runtime_env={} if args.topology else {"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
    ).fit()
    print(json.dumps(result.metrics))


if __name__ == "__main__":
    main()
