"""Measures how soon another process has the adapters of a step after the step was committed.

    python benchmarks/publishing.py [--updates 30] [--directory /dev/shm] [--follow]

One process has a model of the shape of Qwen3-0.6B (bfloat16, random), with LoRA adapters of rank
16 on all linear layers. Once a second it changes the adapters and saves a step. A ``Publisher`` in
it publishes the adapters; with ``--follow``, the program ``torchax-ckpt follow`` does. A third
process calls ``Reader.poll`` every 2 ms, as an engine does between two batches.

Prints the time from the commit of each step, which its commit record has, to the moment at which
the tensors are in the memory of the other process, compared with their digests: median, least and
most, without the first two updates. Prints what waiting costs: the share of a core that the
training process, without ``--follow``, and the reader use while no step is saved.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WARM_UP = 2
_IDLE_SECS = 5.0


def model() -> Any:
    import peft
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base = base.to_empty(device="cpu")
    for parameter in base.parameters():
        parameter.data.normal_(std=0.02)
    base.tie_weights()
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora)


def train(run: Path, out: Path, num_updates: int, follows: bool) -> dict[str, float]:
    """Saves steps, and has them published; returns bytes of an update and the cost of waiting."""
    adapted = model()
    import torchax

    from torchax_ckpt import TorchaxCheckpointer
    from torchax_ckpt.integrations.huggingface import Publisher

    torchax.enable_globally()
    logging.getLogger("torchax").setLevel(logging.ERROR)  # warns of assignments to .data
    adapted.to("jax")
    adapted.get_base_model().tie_weights()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    follow = [sys.executable, "-m", "torchax_ckpt", "follow", str(run), str(out)]
    with TorchaxCheckpointer(run) as ckpt:
        if follows:
            following = subprocess.Popen([*follow, "--format", "peft"], stdout=subprocess.DEVNULL)
        else:
            publisher = Publisher(ckpt, out, format="peft")
        ckpt.attach(adapted)
        for step in range(1, num_updates + 1):
            for parameter in trained:
                parameter.data = parameter.data + 1
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
            time.sleep(1)
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(_IDLE_SECS)
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        if follows:
            following.terminate()
            following.wait()
        else:
            publisher.close()
    return {"update_bytes": sum(p.nbytes for p in trained), "waiting": share}


def read(out: Path, num_updates: int) -> None:
    """Prints a line for each update, and then the cost of waiting."""
    from torchax_ckpt.publishing import Reader

    reader = Reader(out)
    while (reader.step or 0) < num_updates:
        if tensors := reader.poll():
            line = {"step": reader.step, "nsecs": time.time_ns(), "num_tensors": len(tensors)}
            print(json.dumps(line), flush=True)
        time.sleep(0.002)
    began, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - began < _IDLE_SECS / 2:
        reader.poll()
        time.sleep(0.002)
    print(json.dumps({"waiting": (time.process_time() - cpu) / (time.monotonic() - began)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--directory", default="/dev/shm", help="where run and publications go")
    parser.add_argument("--follow", action="store_true", help="publish from a third process")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(Path(arguments.read), arguments.updates)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        run, out = Path(folder, "run"), Path(folder, "published")
        words = [sys.executable, __file__, "--read", str(out), "--updates", str(arguments.updates)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as reading:
            try:
                found = train(run, out, arguments.updates, arguments.follow)
            except BaseException:
                reading.kill()
                raise
            *lines, waiting = map(json.loads, reading.communicate()[0].splitlines())
        record = json.loads((out / ".publishing" / "record.json").read_text())
        committed = {e["step"]: e["commit_timestamp_nsecs"] for e in record["published"]}
        secs = [(line["nsecs"] - committed[line["step"]]) / 1e9 for line in lines][_WARM_UP:]
    print(
        f"{len(secs)} updates of {lines[-1]['num_tensors']} tensors, "
        f"{found['update_bytes'] / 1e6:.0f} MB: {statistics.median(secs):.3f} s "
        f"({min(secs):.3f} - {max(secs):.3f}) from the commit to the other process; "
        f"waiting takes {found['waiting']:.1%} and {waiting['waiting']:.1%} of a core"
    )


if __name__ == "__main__":
    main()
