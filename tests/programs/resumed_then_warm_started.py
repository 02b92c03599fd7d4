"""Several processes go on from step 4; other runs begin from the weights that they save.

python resumed_then_warm_started.py INDEX COUNT PORT DIRECTORY SEED
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
from group_run import ckpt, directory, train, training
from processes_program import Training, digest, report, rule

from torchax_ckpt import load_torch_state_dict, warm_start


def held(training: Training) -> dict[str, list[str]]:
    return {
        n: [digest(np.asarray(s.data)) for s in a.addressable_shards]
        for n, a in training.arrays().items()
    }


assert training.attach(ckpt) == 4
train(5, 7)
ckpt.save(7, force=True)
ckpt.wait_until_finished()
verified = ckpt.verify()
ckpt.close()
# Another run, from its weights.
fresh = Training(5)
taken = warm_start(fresh.model, directory, shardings=rule)
weights = held(fresh)
alike = weights == {n: d for n, d in held(training).items() if n in weights}
# And one from a file of them, of which each process needs other rows.
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "x.safetensors")
    safetensors.torch.save_file(load_torch_state_dict(directory), file)
    third = Training(6)
    warm_start(third.model, file, shardings=rule)
alike = alike and {n: d for n, d in held(third).items() if n in weights} == weights
report(verified=verified, step=taken.step, alike=alike, count=len(weights))
