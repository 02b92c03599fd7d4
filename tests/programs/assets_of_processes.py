"""Two processes save a model with a config, of which each knows something else.

python assets_of_processes.py INDEX COUNT PORT DIRECTORY LOCAL
"""

from __future__ import annotations

import sys
from pathlib import Path

import torchax
from processes_program import INDEX, init, report, rule
from support.described import Described, Tokenizer

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

directory, local = sys.argv[4], Path(sys.argv[5], f"host-{INDEX}")
tokenizer = Tokenizer({"tokenizer.json": "{}"}) if INDEX == 0 else None
model = Described(hidden_size=INDEX).to("meta")
torchax.enable_globally()
tier = LocalTier(local)
with TorchaxCheckpointer(directory, local=tier, options=CheckpointOptions(read_back=True)) as ckpt:
    ckpt.attach(model, tokenizer=tokenizer, shardings=rule, init=init)
    ckpt.save(1)
    ckpt.wait_until_finished()
paths = {"durable": directory, "local": str(local)}
steps = {name: RunDirectory(path, read_only=True).find(1) for name, path in paths.items()}
report(**{name: StoredStep(s, allow_part=True).read_assets() for name, s in steps.items()})
