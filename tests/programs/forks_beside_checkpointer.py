"""Forks children of every kind beside a checkpointer: workers of loaders, killed ones, own ends.

    python forks_beside_checkpointer.py DIRECTORY

Prints "done" at its end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any, cast

import numpy as np
import torch
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import CallError
from torchax_ckpt.runtime import preemption
from torchax_ckpt.storage.writing import array_writer

torchax.enable_globally()

fork = multiprocessing.get_context("fork")
STATE = {"w": np.arange(3)}
ckpt = TorchaxCheckpointer(sys.argv[1], save_decision_policy=policies.FixedIntervalPolicy(1))
ckpt.attach()
ckpt.save(1, state=STATE)
ckpt.wait_until_finished()


class Examples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> str:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL or os.getpid() == parent
        assert ckpt.all_steps() == [1]
        refused = []
        for call in (
            lambda: ckpt.save(9, state=STATE),
            ckpt.attach,
            ckpt.load,
            ckpt.close,
            ckpt.restore,
            lambda: ckpt.delete(1),
            ckpt.wait_until_finished,
            lambda: TorchaxCheckpointer(sys.argv[1]).load(),
        ):
            try:
                call()
            except CallError as error:
                assert "which was forked from process" in str(error), error
                refused.append(str(error).split()[0])
        return ",".join(refused)


# DataLoader's workers, which it ends by SIGTERM if they do not end by themselves.
parent = os.getpid()
loader = torch.utils.data.DataLoader(
    Examples(), batch_size=2, num_workers=2, persistent_workers=True, collate_fn=list
)
expected = "save,attach,load,close,restore,delete,wait_until_finished,load"
assert {item for batch in loader for item in batch} == {expected}
workers = list(cast(Any, loader._iterator)._workers)
del loader
for worker in workers:
    worker.join(20)
    assert worker.exitcode == 0, worker.exitcode

# Ended by SIGTERM right after the fork or later: that is the child's own affair.
for delay in [0] * 20 + [0.2] * 2:
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(delay)
    child.terminate()
    child.join(20)
    assert child.exitcode == -signal.SIGTERM, child.exitcode
time.sleep(0.2)
assert preemption._watch.noticed_at is None
assert not ckpt.reached_preemption(1)

# A child that runs to the end of the program while a save is in flight.
write = array_writer.write_arrays


def slow(*args: Any, **kwargs: Any) -> Any:
    time.sleep(1.5)
    return write(*args, **kwargs)


array_writer.write_arrays = slow
ckpt.save(2, state=STATE)
pid = os.fork()
if pid == 0:
    # Not sys.exit: JAX's own end in a fork may crash.
    threading._shutdown()  # type: ignore[attr-defined]
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert ckpt.all_steps() == [1]  # the child did not wait for its parent's save
os.kill(os.getpid(), signal.SIGTERM)
ckpt.save(3, state=STATE)
assert ckpt.all_steps() == [1, 2, 3] and ckpt.reached_preemption(3)
print("done")
