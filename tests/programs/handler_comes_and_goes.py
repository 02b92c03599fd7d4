"""Checks whose handler of SIGTERM is set while checkpointers come and go.

python handler_comes_and_goes.py DIRECTORY OTHER_DIRECTORY
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from typing import Any

from preempted_program import say, state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.runtime import preemption


def wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) == preemption._watch._handle


def is_untouched() -> bool:
    threads = {thread.name for thread in threading.enumerate()}
    return not is_ours() and wakeup_fd() == -1 and "sigterm" not in threads


here, elsewhere = sys.argv[1:]
num_files = len(os.listdir("/proc/self/fd"))
for _ in range(2):
    with TorchaxCheckpointer(here) as first, TorchaxCheckpointer(elsewhere) as second:
        assert is_untouched()
        first.save(1, state=state(1))
        assert is_ours()
        second.attach()
        first.close()
        assert is_ours()
    assert is_untouched()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert len(os.listdir("/proc/self/fd")) == num_files

# Who only reads still ends at once, and who does not want notices.
reader = TorchaxCheckpointer(here)
reader.all_steps(), reader.load(), reader.metrics(1), reader.reached_preemption(1)
assert is_untouched()
deaf = TorchaxCheckpointer(here, options=CheckpointOptions(preemption_grace_secs=None))
deaf.attach()
assert is_untouched()

# On another thread there is no notice, and that is said.
thread = threading.Thread(target=lambda: TorchaxCheckpointer(here).attach())
thread.start()
thread.join()
assert is_untouched()


# A handler set meanwhile is the user's, and stays; so does the wish to ignore it.
def handler(signum: int, frame: Any) -> None:
    pass


with TorchaxCheckpointer(here) as ckpt:
    ckpt.attach()
    signal.signal(signal.SIGTERM, handler)
assert signal.getsignal(signal.SIGTERM) is handler
signal.signal(signal.SIGTERM, signal.SIG_IGN)
TorchaxCheckpointer(here).attach()
assert is_untouched()
signal.signal(signal.SIGTERM, signal.SIG_DFL)

# Never closed, and gone: nobody would act on a notice.
forgotten = TorchaxCheckpointer(here)
forgotten.attach()
assert is_ours()
del forgotten
gc.collect()
say("forgotten")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
