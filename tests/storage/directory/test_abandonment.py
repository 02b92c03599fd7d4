"""Whatever a run does, the steps that count are those of the branch it is on, for every reader."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.stages import at, fail_at

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.storage.writing import array_writer, step_writer

KEEP = 2
TIERS = ("durable", "local")
NUMBERS = st.integers(0, 7)


class Chosen:
    """Saves when it was told to."""

    is_on = False

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return self.is_on


class Run:
    """A run, program after program, and the steps that are to count in each of its tiers.

    Arrays are not written. Times of commits come in no order, as those of several hosts may.
    ``counts``: the keys that a reader is to find, by tier; ``counts_alone``: those in the durable
    tier without the local one; ``goes_on``: what the present program, once it has looked, has.
    """

    def __init__(self, place: Path, tiers: Sequence[str]) -> None:
        self.paths = {tier: place / tier for tier in tiers}
        self.counts: dict[str, list[Key]] = {tier: [] for tier in tiers}
        self.counts_alone: list[Key] = []
        self.goes_on: dict[str, list[Key]] | None = None
        self.times = (1 + count * 7919 % 997 for count in itertools.count())
        self.written: dict[str, Key] = {}
        self.start()

    def start(self) -> None:
        self.policies = {tier: Chosen() for tier in self.paths}
        local = None
        if "local" in self.paths:
            local = LocalTier(
                self.paths["local"], save_decision_policy=self.policies["local"], keep=KEEP
            )
        self.ckpt = TorchaxCheckpointer(
            self.paths["durable"],
            save_decision_policy=self.policies["durable"],
            preservation_policy=policies.PreserveAll(),
            local=local,
        )
        self.goes_on = None

    def end(self) -> None:
        with contextlib.suppress(SaveError):
            self.ckpt.close()

    @contextlib.contextmanager
    def faked(self) -> Iterator[None]:
        """Steps consist of a summary and a commit record."""

        def complete(path: Any, arrays: Any, manifest: Any, summary: Any, **_: Any) -> None:
            (path / committed_step.SUMMARY).mkdir(parents=True)
            (path / committed_step.SUMMARY / "data.json").write_bytes(seals.encoded(summary))
            at = next(self.times)
            record = {"commit_timestamp_nsecs": at, "item_handlers": {}}
            (path / "_CHECKPOINT_METADATA").write_text(json.dumps(record))
            number = int(path.name.split("-")[1])
            self.written[path.parent.name] = (number, at)

        with (
            mock.patch.object(array_writer, "write_arrays", return_value={}),
            mock.patch.object(step_writer, "complete", complete),
        ):
            yield

    # --- what may happen ---

    def restart(self) -> None:
        self.end()
        self.start()

    def lose_local(self) -> None:
        """The program ends, and the host with its ramdisk is lost."""
        self.end()
        if "local" in self.paths:
            shutil.rmtree(self.paths["local"], ignore_errors=True)
            self.counts = {"durable": list(self.counts_alone), "local": []}
        self.start()

    def go_back(self, step: int | None) -> None:
        self.ckpt._run.wait()
        self.ckpt._run.go_on_from(step)
        self.goes_on = {
            tier: [key for key in keys if step is not None and key[0] <= step]
            for tier, keys in self.counts.items()
        }

    def delete(self, step: int) -> None:
        """With one tier only: a deleted step takes with it what it says of the other tier."""
        if len(self.paths) > 1 or step not in [key[0] for key in self.counts["durable"]]:
            return
        self.ckpt.delete(step)
        for known in (self.counts, self.goes_on or {}):
            if known:
                known["durable"] = [key for key in known["durable"] if key[0] != step]
        self.counts_alone = list(self.counts["durable"])

    def save(self, step: int, where: tuple[str, ...], how: str) -> None:
        """Saves to some of the tiers; then all goes well, or the program is stopped at some point.

        "failed": committed, but the save fails; "untidied": ends before it tidies up; "half":
        ends after it set aside one of the steps.
        """
        goes_on = self.goes_on or {tier: list(keys) for tier, keys in self.counts.items()}
        due = [t for t in where if t in self.paths and step not in [n for n, _ in goes_on[t]]]
        if not due:
            return
        if how == "failed":  # of two, one may abandon what the other has left already
            due = due[:1]
        for tier, policy in self.policies.items():
            policy.is_on = tier in due
        self.ckpt._loop.position = None  # any step may be saved next
        with contextlib.ExitStack() as stack:
            if how == "failed":
                stack.callback(fail_at("end a durable save", OSError(5, "failed")))
            if how in ("untidied", "half"):
                self.stop_tidying(stack, how)
            assert self.ckpt.save(step, state={"w": np.zeros(2)})
            with contextlib.suppress(SaveError):
                self.ckpt.wait_until_finished()
        goes_on = {tier: [k for k in keys if k[0] <= step] for tier, keys in goes_on.items()}
        self.counts = {tier: list(keys) for tier, keys in goes_on.items()}
        for tier in due:
            self.counts[tier].append(self.written[tier])
            if how != "failed":
                goes_on[tier].append(self.written[tier])
            if how == "well" and tier == "local":
                self.counts[tier] = goes_on[tier] = goes_on[tier][-KEEP:]
        if "durable" in due:
            self.counts_alone = list(self.counts["durable"])
        self.goes_on = goes_on
        if how in ("untidied", "half"):
            self.restart()

    def stop_tidying(self, stack: contextlib.ExitStack, how: str) -> None:
        tidying, set_aside = set[int](), RunDirectory.set_aside

        def stopped(directory: RunDirectory, steps: Any) -> Any:
            if threading.get_ident() not in tidying:
                return set_aside(directory, steps)
            set_aside(directory, list(steps)[: int(how == "half")])
            raise OSError(5, "killed")

        def learned() -> None:
            tidying.add(threading.get_ident())

        stack.callback(at("end a durable save", learned, when="after"))
        stack.enter_context(mock.patch.object(RunDirectory, "set_aside", stopped))

    # --- what is to be seen ---

    def check(self) -> None:
        durable = RunDirectory(self.paths["durable"], read_only=True)
        assert [s.key for s in durable.steps()] == self.counts_alone
        if "local" in self.paths:
            local = RunDirectory(self.paths["local"], read_only=True, durable=durable)
            assert [s.key for s in local.steps()] == self.counts["local"]
        assert [s.key for s in durable.steps()] == self.counts["durable"]
        if self.goes_on is not None:
            for tier in self.ckpt._run.tiers:
                known = [(s.step, s.commit_timestamp_nsecs) for s in tier.history.checkpoints()]
                assert known == self.goes_on[tier.name]


SAVES = st.tuples(
    st.just("save"),
    NUMBERS,
    st.sampled_from([("durable",), ("local",), TIERS]),
    st.sampled_from(["well", "well", "failed", "untidied", "half"]),
)
EVENTS = st.one_of(
    SAVES,
    SAVES,
    st.tuples(st.just("go_back"), st.none() | NUMBERS),
    st.sampled_from([("restart",), ("lose_local",)]),
    st.tuples(st.just("delete"), NUMBERS),
)


@given(st.sampled_from([("durable",), TIERS]), st.lists(EVENTS, min_size=4, max_size=12))
@settings(max_examples=20, phases=[Phase.generate])  # shrinking takes minutes
def test_the_steps_that_count_are_those_of_the_branch_the_run_is_on(
    tiers: tuple[str, ...], events: list[tuple[Any, ...]]
) -> None:
    memory = Path("/dev/shm")  # each save waits for the medium several times
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        run = Run(Path(place), tiers)
        with run.faked():
            try:
                for name, *arguments in events:
                    getattr(run, name)(*arguments)
                    run.check()
            finally:
                run.end()
