"""Two processes write or read a golden checkpoint together: see ``support/golden.py``.

    python golden_program.py INDEX COUNT PORT DIRECTORY HOSTS STEP SEED write|read

HOSTS is a folder for local tiers, one for each process, which alone save then; it may be empty.
"""

from __future__ import annotations

import sys

from processes_program import INDEX, Training, report

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

directory, hosts, act = *sys.argv[4:6], sys.argv[8]
step, seed = map(int, sys.argv[6:8])
every = policies.FixedIntervalPolicy(step)
ckpt = TorchaxCheckpointer(
    directory,
    save_decision_policy=policies.SpecificStepsPolicy(()) if hosts else every,
    local=LocalTier(f"{hosts}/{INDEX}", save_decision_policy=every) if hosts else None,
)
training = Training(seed, width=8)
start = training.attach(ckpt)
if act == "write":
    for number in range(1, step + 1):
        training.step()
        ckpt.save(number, metrics={"loss": 0.25, "note": "golden", "history": [1, None, True]})
    ckpt.close()
    report(own=training.own(), whole=training.whole())
else:
    tier = ckpt.restore().tier
    report(start=start, tier=tier, own=training.own(), whole=training.whole())
    training.step()
    ckpt.save(2 * step)
    ckpt.close()
