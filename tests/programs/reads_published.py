"""Loads the folder that ``latest`` names, again and again; says if it was ever not a whole model.

    reads_published.py OUT

Prints "reading", and reads until it gets SIGTERM. Each weight of a step must be the number of the
step. Then prints JSON: how many loads, of how many folders, and what was wrong. A load that took
longer than the folder had to live tells nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers
from publishes_steps import GRACE_SECS
from transformers import LlamaForCausalLM

FILES = {"config.json", "generation_config.json", "model.safetensors"}


def findings(out: Path, folder: Path) -> list[str]:
    """What is wrong with a folder that ``latest`` names, and with all that are listed."""
    found = []
    for path in out.glob("step-*"):
        with contextlib.suppress(FileNotFoundError):  # deleted after it was listed
            files = {file.name for file in path.iterdir()}
            if files != FILES and path.exists():
                found.append(f"{path.name}: has only {sorted(files)}")
    step = int(re.fullmatch(r"step-(\d+)", folder.name)[1])  # type: ignore[index]
    try:
        model, info = LlamaForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        return [*found, f"{folder.name}: {error!r:.500}"]
    if any(info.values()):
        found.append(f"{folder.name}: {info}")
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, torch.full_like(weight, step)):
            found.append(f"{folder.name}: {name} is not of step {step}")
    return found


def main() -> None:
    out = Path(sys.argv[1])
    wrong: list[str] = []
    read: list[str] = []

    def end(*args: object) -> None:
        told = {"loads": len(read), "folders": len(set(read)), "wrong": wrong[:10]}
        print(json.dumps(told), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print("reading", flush=True)
    while True:
        if not (out / "latest").exists():
            continue
        began = time.monotonic()
        folder = out / (out / "latest").read_text().strip()
        found = findings(out, folder)
        if time.monotonic() < began + GRACE_SECS:
            read.append(folder.name)
            wrong += found


if __name__ == "__main__":
    main()
