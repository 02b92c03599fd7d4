"""Several processes go on from step 8 of a run that other numbers of them began.

python continued_by_others.py INDEX COUNT PORT DIRECTORY SEED
"""

from __future__ import annotations

import warnings

from group_run import ckpt, train, training
from processes_program import report

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    assert training.attach(ckpt) == 8
report(whole=training.whole(), own=training.own(), warned=[str(w.message) for w in warned])
train(9, 12)
assert ckpt.restore(8).step == 8
train(9, 12)
train(13, 14)
ckpt.close()
