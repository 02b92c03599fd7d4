"""Trains a model of transformers, sharded (FSDP), from a folder to a folder; survives being killed.

    python examples/pretrain_hf.py --directory runs/llama
    python examples/pretrain_hf.py --directory runs/llama --devices 4    # resumes on half of them
    python examples/pretrain_hf.py --directory runs/llama --model FOLDER    # as downloaded
    python examples/pretrain_hf.py --check-topology v5e:2x4    # compiles for TPUs, without TPUs
    torchax-ckpt export runs/llama out/ --format hf    # for from_pretrained("out/")

Kill it (or let it kill itself: ``--crash-at 60``) and run the same command again. The run resumes
from the newest checkpoint, and ends with the same bits as an uninterrupted run. On another number
of devices the restored state has the same bits, with other shardings.

Without ``--model`` the model is a small Llama with random weights, grouped attention and an
embedding that is tied to the head. The jitted step donates parameters and optimizer state.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hf_training  # Before JAX: it sets the number of simulated devices.
import optax
import small_llama
import torch
import torchax
import transformers
from torchax import interop
from tqdm import tqdm

from torchax_ckpt import TorchaxCheckpointer, shardings, warm_start
from torchax_ckpt.errors import PlanError


def main() -> None:
    args, mesh = hf_training.arguments(__doc__, "runs/llama")
    rule = shardings.fsdp(mesh)

    # Transformers' part comes before torchax is enabled. On the meta device the model has shapes
    # but no weights, because no device, and maybe no host, can hold a large one as a whole.
    folder = args.model or small_llama.make(Path("runs/small-llama"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    loader = hf_training.text_loader(tokenizer, args)

    torchax.enable_globally()
    env = torchax.default_env()
    torch.manual_seed(args.seed)  # torchax has a random key of its own:
    env.manual_seed(args.seed)
    optimizer = optax.adamw(3e-3)
    if args.check_topology:
        hf_training.check(args.check_topology, model, optimizer, mesh)
        return

    with TorchaxCheckpointer(args.directory) as ckpt:
        if ckpt.latest_step() is None:
            # At the first start, the folder supplies the weights; later the checkpoint does.
            warm_start(model, folder, shardings=rule)
        train_step, *abstract = hf_training.training_step(model, optimizer, rule)
        moments = hf_training.first_state(optimizer, *abstract)
        start = ckpt.attach(
            model,
            dataloader=loader,
            stateful={"optimizer": moments},
            tokenizer=tokenizer,  # With it, any step can be exported as a folder.
            shardings=rule,
        )
        print(f"resumed: step {start}" if start else "started: no checkpoint")
        params, frozen = hf_training.split(model)  # No parameter is frozen, only buffers.
        batches = hf_training.batches(loader, mesh)
        steps = range(start + 1, args.steps + 1)
        # disable=None shows the bar only on a terminal.
        for step in tqdm(steps, initial=start, total=args.steps, unit="step", disable=None):
            tokens, targets = next(batches)
            # Part of the random state that each checkpoint saves.
            key = interop.torch_view(env.get_and_rotate_prng_key())
            loss, params, moments.state = train_step(
                params, frozen, moments.state, (tokens, key), targets
            )
            hf_training.put_back(model, params)
            ckpt.save(step, metrics={"loss": loss}, force=step == args.steps)
            if step % 20 == 0 or step == args.steps:
                tqdm.write(f"step {step}: loss {loss.item():.4f}")
            if step == args.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if ckpt.reached_preemption(step):  # save has waited until this step was durable.
                break

    if ckpt.reached_preemption():
        print(f"preempted: saved step {ckpt.latest_step()}")
    ckpt.exit_if_preempted()  # With an error code, so that the scheduler restarts the job.
    print(f"devices: {mesh.size}")
    print(f"final state: {hf_training.digest([params, frozen, moments.state_dict()])}")
    print(f"saved: step {ckpt.latest_step()} in {ckpt.directory}")


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        sys.exit(f"--check-topology: {error}")
