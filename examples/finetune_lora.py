"""Fine-tunes a model of transformers with LoRA by PEFT, sharded (FSDP), and survives being killed.

    python examples/finetune_lora.py --directory runs/lora
    python examples/finetune_lora.py --directory runs/lora --model FOLDER    # as downloaded
    python examples/finetune_lora.py --check-topology v5e:2x4    # compiles for TPUs, without TPUs

Kill it (or let it kill itself: ``--crash-at 60``) and run the same command again. The run resumes
from the newest checkpoint, and ends with the same bits as an uninterrupted run. A thread publishes
the adapter while it is trained, and at the end: folders for ``peft.PeftModel.from_pretrained``.

The base never changes. With ``reuse=True`` two saves write it, and all later ones link it. The
jitted step donates the adapter and the optimizer's state, and does not return the base. Without
``--model`` the base is a small Llama with random weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import hf_training  # Before JAX: it sets the number of simulated devices.
import optax
import peft
import small_llama
import torch
import torchax
import transformers
from torchax import interop
from tqdm import tqdm

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, shardings, warm_start
from torchax_ckpt.errors import PlanError
from torchax_ckpt.integrations.huggingface import Publisher


def main() -> None:
    args, mesh = hf_training.arguments(__doc__, "runs/lora")
    rule = shardings.fsdp(mesh)

    # Transformers' part comes before torchax is enabled. On the meta device the base has shapes
    # but no weights, because no device, and maybe no host, can hold a large one as a whole.
    folder = args.model or small_llama.make(Path("runs/small-llama"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.name_or_path = str(folder)  # The adapter's config tells it to whoever loads the adapter.
    loader = hf_training.text_loader(tokenizer, args)

    torchax.enable_globally()
    logging.getLogger("torchax.tensor").setLevel(logging.ERROR)  # It warns of PEFT's use of .data.
    env = torchax.default_env()
    torch.manual_seed(args.seed)  # torchax has a random key of its own:
    env.manual_seed(args.seed)

    published = Path(f"{args.directory}-adapters")
    options = CheckpointOptions(reuse=True)
    with (
        TorchaxCheckpointer(args.directory, options=options) as ckpt,
        contextlib.ExitStack() as publishing,
    ):
        if ckpt.latest_step() is None and not args.check_topology:
            # At the first start, the folder supplies the base; later the checkpoint does.
            warm_start(base, folder, shardings=rule, cast=True)
        # The adapter is in float32, as PEFT makes it for a base in bfloat16.
        lora = peft.LoraConfig(
            r=8,
            lora_alpha=16,
            lora_dropout=0.1,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(base, lora)
        optimizer = optax.adamw(3e-3)
        if args.check_topology:
            hf_training.check(args.check_topology, model, optimizer, mesh)
            return

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
        publishing.enter_context(Publisher(ckpt, published, format="peft", every=100))
        params, frozen = hf_training.split(model)
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
    print(f"final state: {hf_training.digest([params, frozen, moments.state_dict()])}")
    print(f"saved: step {ckpt.latest_step()} in {ckpt.directory}")
    latest = published / "latest"
    if latest.exists():  # Process 0 publishes.
        print(f"published: {published / latest.read_text().strip()}")


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        sys.exit(f"--check-topology: {error}")
