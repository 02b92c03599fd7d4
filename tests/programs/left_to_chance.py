"""Prints as JSON what is left to chance in a program."""

from __future__ import annotations

import json
import os
import random
import tempfile
import uuid

import numpy as np
import tensorstore as ts
import torch

folder = tempfile.mkdtemp()
store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
store.write("key", b"x" * 10_000).result()
print(
    json.dumps(
        {
            "torch": torch.rand(()).item(),
            "python": random.random(),
            "numpy": np.random.random(),
            "generator": np.random.default_rng().random(),
            "uuid": str(uuid.uuid4()),
            "folder": folder,
            "names of files": sorted(os.listdir(f"{folder}/d")),
            "hashes": hash("word"),
        }
    )
)
