"""A run on several processes that reuses frozen leaves, does what it is told, and reports.

    python reuse_on_processes.py INDEX COUNT PORT SETTINGS

SETTINGS is JSON: those of ``support.reusing.Run``, and "do": a list of actions, each the name of a
method of ``Here`` with its arguments; "ramdisks": the folder of local tiers; "here": the settings
of each process; "is_stateful": whether each process has a state of its own, of 2 MiB that do not
change.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# First, because it connects the processes.
from processes_program import COUNT, INDEX, patch, report

# isort: split
import numpy as np
from support.linked import data_file
from support.reusing import QUARTER, Run
from support.stages import at, die

from torchax_ckpt.errors import MetricsError, SaveError, SelectionError
from torchax_ckpt.processes.messages import Messages

sent: list[int] = []
messages: list[int] = []  # of each save
send = Messages._set


def sending(self: Any, *args: Any) -> None:
    sent.append(1)
    send(self, *args)


patch(Messages, "_set", sending)


class Buffer:
    """A state that each process has for itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": np.random.default_rng(INDEX).random(1 << 18)}

    def load_state_dict(self, state: Any) -> None:
        pass


class Here(Run):
    """The part of a run on this process; notes how many messages it sent in each save."""

    def save(self, times: int = 1, **settings: Any) -> None:
        for _ in range(times):
            sent.clear()
            super().save(**settings)
            messages.append(len(sent))

    def on(self, index: int, action: str, *arguments: Any) -> None:
        """Has one process do something."""
        if index == INDEX:
            getattr(self, action)(*arguments)

    def change_quarter(self) -> None:
        """Changes the part of "sharded" that process 1 of 4 has, which is another object there."""
        if INDEX == 1:
            self._put("sharded", QUARTER)
        self.versions["sharded"] = QUARTER

    def train(self, *leaves: str) -> None:
        """Has each save come with other values of these leaves."""
        self.moving = {"head", *leaves}

    def unfreeze(self, leaf: str) -> None:
        self.model.get_parameter(leaf).requires_grad_(True)

    def is_refused(self) -> None:
        """Calls ``save``, which raises; the save has failed on all processes."""
        try:
            self.save()
        except SelectionError as error:
            report(failed=str(error))
            self.reused["whole"] += "x"

    def lose_file(self, step: int) -> None:
        """Removes a file of frozen leaves that process 1 wrote."""
        data_file(self.directory, step, of_process=1).unlink()

    def fail_on(self, index: int, *arguments: Any) -> None:
        """Has a process fail at a stage, and with it the save of all."""
        said = self.fail(*arguments) if index == INDEX else self.failed()
        report(failed=said)

    def refuse_on(self, index: int) -> None:
        """Has a process refuse to save a step, which fails on all."""
        began = time.monotonic()
        try:
            self.save(loss=object() if index == INDEX else 1.0)
        except (MetricsError, SaveError) as error:
            report(failed=str(error), secs=time.monotonic() - began)
        with contextlib.suppress(SaveError):
            self.ckpt.wait_until_finished()

    def die_on(self, index: int) -> None:
        """Has a process die once all have linked; the others are told, and end."""
        if index == INDEX:
            at("link unchanged arrays", die, when="after")
            at("link unchanged arrays", lambda: time.sleep(0.5), when="after")
        report(failed=self.failed(), reused=self.reused["whole"])
        os._exit(3)  # JAX would wait for the dead one


if __name__ == "__main__":
    settings = json.loads(sys.argv[4])
    directory, actions = Path(settings.pop("directory")), settings.pop("do")
    settings |= settings.pop("here", [{}] * COUNT)[INDEX]
    if ramdisks := settings.pop("ramdisks", None):
        settings["local"] = Path(ramdisks, str(INDEX))
    if settings.pop("is_stateful", False):
        settings |= {"own": {"own": Buffer()}, "own_bytes": COUNT << 21}
    with Here(directory, **{"process_timeout_secs": 60, **settings}) as run:
        report(start=run.step)
        for name, *arguments in actions:
            getattr(run, name)(*arguments)
        run.end()
        report(reused=run.reused, messages=messages, steps=run.ckpt.all_steps())
