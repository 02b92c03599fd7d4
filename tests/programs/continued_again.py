"""Several processes go on from step 12 and verify what they save.

python continued_again.py INDEX COUNT PORT DIRECTORY SEED
"""

from __future__ import annotations

import warnings

from group_run import ckpt, train, training
from processes_program import report

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    assert training.attach(ckpt) == 12
report(whole=training.whole(), own=training.own(), warned=[str(w.message) for w in warned])
train(13, 14)
ckpt.save(14, force=True)
ckpt.wait_until_finished()
assert ckpt.verify() == 14
ckpt.close()
