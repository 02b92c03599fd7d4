"""Two processes that do not make the same calls, in one way after another.

python differing_calls.py INDEX COUNT PORT FOLDER
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torchax
from processes_program import INDEX, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError

torchax.enable_globally()
STATE = {"w": np.arange(3)}


class Loader:
    """Something to attach."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state: Any) -> None:
        pass


def opened(name: str, policy: Any = None) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        f"{sys.argv[4]}/{name}",
        save_decision_policy=policy,
        preservation_policy=policies.PreserveAll(),
        options=CheckpointOptions(process_timeout_secs=60),
    )


def save(step: int, *, force: bool = True) -> Any:
    return lambda: ckpt.save(step, state=STATE, force=force)


def told(name: str, *calls: tuple[Callable[[], Any], ...]) -> None:
    """Makes the calls of this process, and reports what came of each."""
    with meeting.round(f"coming to {name}"):
        pass
    began, found = time.monotonic(), []
    for call in calls[INDEX]:
        try:
            found.append(repr(call()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    secs = time.monotonic() - began
    with meeting.round(f"ending {name}"):
        pass
    report(name=name, found=found, secs=secs, steps=ckpt.all_steps())


ckpt = opened("meeting")
meeting, done = ckpt._processes, ckpt.wait_until_finished
ckpt = opened("run")
ckpt.attach(stateful={"loader": Loader()})
done = ckpt.wait_until_finished
told("nothing differs", (save(1), done, save(2), done), (save(1), done, save(2), done))
told("other steps", (save(10), done), (save(12), done))
told("the same again", (save(13), done), (save(13), done))
# One leaves out a save; the next ones are whole.
told("left out", (save(14), save(16), done, save(17), done), (save(16), done, save(17), done))
told("restoring", (lambda: ckpt.restore(2).step,), (save(20), done))
told("together", (lambda: ckpt.restore(2).step,), (lambda: ckpt.restore(2).step,))
told("other restores", (lambda: ckpt.restore(1).step,), (lambda: ckpt.restore(2).step,))
told("deleting", (save(21), done), (lambda: ckpt.delete(1),))
told("loading", (lambda: ckpt.load(2),), (save(22), done))
told("no step", (save(23), done), (lambda: ckpt.save("23", state=STATE),))  # type: ignore[arg-type]
told("at last", (save(24), done), (save(24), done))
told("closing", (save(25), done), (ckpt.close,))
with contextlib.suppress(SaveError):
    ckpt.close()

# Unforced, where only process 0 decides.
ckpt = opened("unforced", policies.FixedIntervalPolicy(5))
ckpt.attach(stateful={"loader": Loader()})
done = ckpt.wait_until_finished
told("nothing to save", (save(1, force=False),), (save(1, force=False),))
told("unforced", (save(10, force=False), done), (save(12, force=False), done))
told("after", *[(save(13, force=False), save(14, force=False))] * 2)
told("passed", (save(15, force=False), done), (save(16, force=False), done))
told("unforced at last", (save(20, force=False), done), (save(20, force=False), done))
ckpt.close()

# Process 0 neither saves nor waits.
ckpt = opened("declined", policies.FixedIntervalPolicy(5))
ckpt.attach(stateful={"loader": Loader()})
told("declined", (save(2, force=False),), (lambda: ckpt.restore(1).step,))
told("not there", *[(lambda: ckpt.restore(1).step,)] * 2)
ckpt.close()
