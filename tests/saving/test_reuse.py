"""A save reuses frozen leaves; every step stays complete, and no neighbours share files."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from support.device_memory import OFFLOAD
from support.reusing import ALL, FROZEN, HOST, SHAPES, Run

from torchax_ckpt import policies
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.runtime.stages import Stage

LATEST = policies.LatestN(1)


def verify(run: Run, step: int, is_damaged: bool = True) -> None:
    """Finds the damage of a step, or none."""
    if is_damaged:
        with pytest.raises(CorruptCheckpointError, match=r"model/(whole|rows|sharded)"):
            run.ckpt.verify(step)
    else:
        run.ckpt.verify(step)


def train(run: Run, *leaves: str) -> None:
    """Has each save come with other values of these leaves."""
    run.moving = {"head", *leaves}


def freeze(run: Run, *leaves: str) -> None:
    for leaf in leaves:
        run.model.get_parameter(leaf).requires_grad_(False)


def unfreeze(run: Run, *leaves: str) -> None:
    """Trains leaves from now on, which are then those that change, with the head."""
    for leaf in leaves:
        run.model.get_parameter(leaf).requires_grad_(True)
    train(run, *leaves)


def peek(run: Run) -> None:
    """Reads two steps beside the state."""
    run.ckpt.load(4)
    run.ckpt.load(6)


OPTIONS: list[dict[str, Any]] = [
    {"compression": "blosc-zstd"}, {"max_host_bytes": 1 << 20}, {"read_back": True},
    *({"snapshot": mode} for mode in OFFLOAD),
]  # fmt: skip
# What a run does with some settings; and, for each save, what it reuses of earlier steps (see
# ``Run.reused``): "whole" is a frozen leaf on the devices, "table" one on the host.
SCENARIOS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]], dict[str, str]]] = {
    "frozen parameters are written twice, then reused in turn":
        ({"reuse": True}, [("save", 6)], {"whole": "ww2222", "table": "wwwwww"}),
    "what patterns name is, whatever it is":
        ({"frozen": False}, [("save", 4)], {"whole": "ww22", "table": "ww22", "head": "wwww"}),
    "auto reuses frozen parameters of half the bytes":
        ({"reuse": "auto"}, [("save", 4)], {"whole": "ww22", "table": "wwww"}),
    "auto reuses nothing else":
        ({"reuse": "auto", "frozen": False}, [("save", 4)], {"whole": "wwww", "table": "wwww"}),
    "each start asks again": (
        {"reuse": "auto"},
        [("save", 3), ("restart", {"frozen": False}), ("save", 2),
         ("restart", {"frozen": True}), ("save", 3)],
        {"whole": "ww2" "ww" "ww2"},
    ),
    "each restore asks again": (
        {"reuse": True, "frozen": False},
        [("save", 3), (freeze, "whole"), ("back", 3), ("save", 3)],
        {"whole": "www" "ww2", "rows": "www" "www"},
    ),
    "a parameter that is trained from now on is not reused": (
        {"reuse": True}, [("save", 4), (unfreeze, "layers.2"), ("save", 8)],
        {"layers.2": "ww22" "wwwwwwww", "layers.1": "ww22" "www22222", "whole": "ww22" "www22222"},
    ),
    "below half of the bytes, auto then reuses nothing": (
        {"reuse": "auto"}, [("save", 4), (unfreeze, "whole", "rows", "sharded"), ("save", 6)],
        {"layers.2": "ww22" "wwwwww"},
    ),
    "reuse can be off": ({"reuse": False}, [("save", 4)], {"whole": "wwww", "table": "wwww"}),
    "reuse can be switched off": (
        {"keep": 1}, [("save", 3), ("restart", {"reuse": False}), ("save", 1)], {"whole": "wwaw"},
    ),
    "a change of one kind of leaves does not write the other again": (
        {}, [("save", 4), ("change", HOST), ("save", 4)],
        {"whole": "ww22" "2222", "table": "ww22" "ww22"},
    ),
    "other data of a frozen parameter are written": (
        {"reuse": True}, [("save", 4), ("change", "whole", {"how": "data"}), ("save", 4)],
        {"whole": "ww22" "ww22"},
    ),
    "another parameter in its place is written": (
        {"reuse": True}, [("save", 4), ("change", "whole", {"how": "parameter"}), ("save", 4)],
        {"whole": "ww22" "ww22"},
    ),
    "no stack has frozen leaves beside others": (
        {"reuse": ["model.layers.0", "model.layers.1"]}, [(train, "layers.2"), ("save", 4)],
        {"layers.1": "ww22", "layers.2": "wwww", "whole": "wwww"},
    ),
    "a full disk has no room to write them again": (
        {}, [("save", 4), ("fail", errno.ENOSPC), ("save", 3)],
        {"whole": "ww22" "x332", "table": "ww22" "x332"},
    ),
    "after other failures the files may be damaged": (
        {}, [("save", 4), ("fail", errno.EIO), ("save", 3)],
        {"whole": "ww22" "xw32", "table": "ww22" "xw32"},
    ),
    "what a failed save wrote is no base of the next": (
        {}, [("save", 4), ("change", "whole", HOST), ("fail", errno.ENOSPC), ("save", 3)],
        {"whole": "ww22" "xww2", "table": "ww22" "xww2"},
    ),
    "a run that went back shares nothing with the step before": (
        {}, [("save", 5), ("back", 3), ("save", 3), ("back", 4), ("save", 3)],
        {"whole": "ww222" "w22" "w22", "table": "ww222" "w22" "w22"},
    ),
    "a restarted run reuses the step that it restored, not the damaged one before": (
        {}, [("save", 4), ("flip", 3), ("restart",), ("save", 4)],
        {"whole": "ww22" "w222", "table": "ww22" "w222"},
    ),
    "on another mesh, arrays are cut into other blocks": (
        {}, [("save", 4), ("restart", {"devices": 2}), ("save", 4)],
        {"whole": "ww22" "ww22", "table": "ww22" "w222"},
    ),
    "nothing is reused of a step that was not compared": (
        {}, [("save", 4), ("restart", {"verify": "never"}), ("save", 4)],
        {"whole": "ww22" "ww22", "table": "ww22" "ww22"},
    ),
    "nothing is reused of a step found damaged": (
        {}, [("save", 5), ("flip", 5), (verify, 5), ("save", 4)],
        {"whole": "ww222" "ww22", "table": "ww222" "ww22"},
    ),
    "nor of it if it is the only one": (
        {"keep": 1}, [("save", 5), ("flip", 5), (verify, 5), ("save", 4)],
        {"whole": "wwaaa" "awaa", "table": "wwaaa" "awaa"},
    ),
    "the newest verified step is kept, and shares nothing with the newest one": (
        {"keep": 1}, [("save", 6), (verify, 6, False), ("save", 4)],
        {"whole": "wwaaaa" "a111", "table": "wwaaaa" "a111"},
    ),
    "arrays that are the same objects are not looked at; others with their values are": (
        {"is_proof": True}, [("save", 6), ("renew", "whole"), ("save", 2)],
        {"looked": "110000" "10", "whole": "ww2222" "22"},
    ),
    "after a restart, one save looks at the arrays; what is read beside changes nothing": (
        {"is_proof": True}, [("save", 6), ("restart",), (peek,), ("save", 3)],
        {"looked": "110000" "100", "whole": "ww2222" "w22"},
    ),
    "a change after a restart is written": (
        {"is_proof": True}, [("save", 4), ("restart",), ("change", "whole"), ("save", 3)],
        {"whole": "ww22" "ww2"},
    ),
    "neither tier looks at arrays that are the same objects": (
        {"is_proof": True, "local": True, "keep_local": 2},
        [("save", 8), ("change", "whole"), ("save", 6)],
        {"looked": "11100000" "111000"},
    ),
    "each tier reuses its own steps": (
        {"local": True}, [("save", 5), ("restart",), ("save", 4)],
        {"whole": "ww4" "ww", "local whole": "ww222" "w222"},
    ),
    "local saves reuse before a first durable one": (
        {"local": True, "reuse": "auto", "durable": (4,)}, [("save", 5), ("restart",), ("save", 4)],
        {"whole": "w", "local whole": "ww222" "w222"},
    ),
    "a local tier of one step has one copy": (
        {"local": True, "keep_local": 1}, [("save", 5), ("restart",), ("save", 4)],
        {"whole": "ww4" "ww", "local whole": "w1111" "1111"},
    ),
    **{
        f"reuse goes with {options}": (options, [("save", 5)], {"whole": "ww222", "table": "ww222"})
        for options in OPTIONS
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_each_save_reuses(name: str, directory: Path) -> None:
    settings, actions, expected = SCENARIOS[name]
    if "local" in settings:
        settings = {**settings, "local": directory.with_name("ramdisk")}
    with Run(directory, **settings) as run:
        for action, *arguments in actions:
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            act = getattr(Run, action) if isinstance(action, str) else action
            act(run, *arguments, **keywords)
        assert {name: run.reused[name] for name in expected} == expected
        if run.local:
            durable, local = (
                {p.stat().st_ino for p in place.rglob("d/*")}
                for place in (run.directory, run.local)
            )
            assert not durable & local
            run.check_each_alone("local")
        run.check_each_alone()


@pytest.mark.parametrize(
    "rules",
    [
        (LATEST, policies.EveryNSteps(4)),
        (LATEST, policies.EveryNSteps(3)),
        (policies.LatestN(2), policies.EveryNSteps(4)),
        (LATEST, policies.BestN(metric="loss")),
    ],
)
def test_no_neighbours_share_whatever_is_kept(rules: tuple[Any, ...], directory: Path) -> None:
    """And after the first saves of a program, no save writes the frozen leaves again."""
    with Run(directory, keep=policies.AnyPreservationPolicy(rules)) as run:
        for step in range(1, 15):
            if step == 10:
                run.restart()
            run.save(loss={3: 1.0, 6: 0.5}.get(step, 2.0 + step % 3))
        assert "w" not in run.reused["whole"][2:9]
        assert run.reused["whole"][9:].count("w") <= 1
        run.check()


# --- any sequence ------------------------------------------------------------------------------

BOTH = policies.AnyPreservationPolicy([LATEST, policies.EveryNSteps(4)])


def expected_reused(num_quiet: int, reuse: Any, frozen: bool, moving: set[str]) -> set[str]:
    """The leaves that a save may not write again.

    So many saves of this program stored the same values before, and no step was deleted. Leaves on
    the devices share a database, which is written again if one of them changes.
    """
    named = {True: FROZEN if frozen else set(), "auto": FROZEN if frozen else set(), False: set()}
    leaves = named[reuse] if isinstance(reuse, bool | str) else FROZEN | {HOST}
    kinds = (leaves & FROZEN, leaves & {HOST})
    return set().union(*(kind for kind in kinds if num_quiet >= 2 and not kind & moving))


LEAVES = st.sets(st.sampled_from([*sorted(FROZEN), HOST]), min_size=1, max_size=3)
TIMES = st.sampled_from([0, 1, 2, 3, 5])


class AnySequence(RuleBasedStateMachine):
    """Changes, failures, deletions and restarts in any order, and some saves after each."""

    @initialize(
        keep=st.sampled_from([None, 1, 2, BOTH]),
        has_local=st.booleans(),
        is_proof=st.booleans(),
        frozen=st.booleans(),
        snapshot=st.sampled_from(["auto", "copy", "reference"]),
        times=TIMES,
    )
    def start(self, keep: Any, has_local: bool, times: int, **settings: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        place = Path(self.folder.name)
        local = place / "ramdisk" if has_local else None
        self.run = Run(place / "run", keep=keep, local=local, **settings)
        self.save(times)

    def save(self, times: int, changing: str = "") -> None:
        """Saves after a disturbance; see ``Run.save``."""
        run, num_quiet = self.run, 0
        for _ in range(times):
            run.save(changing=changing)
            if run.step in run.ckpt.all_steps("durable"):
                written = {leaf for leaf in SHAPES if run.reused[leaf][-1] == "w"}
                moving = run.moving | {changing}
                reuse = run.settings["reuse"]
                assert not written & expected_reused(num_quiet, reuse, run.is_frozen, moving)
                assert reuse or written == SHAPES.keys()
                num_quiet += 1

    @rule(leaves=LEAVES, how=st.sampled_from(["training", "data", "parameter"]), times=TIMES)
    def change(self, leaves: set[str], how: str, times: int) -> None:
        self.run.change(*sorted(leaves), how=how)
        self.save(times)

    @rule(leaf=st.sampled_from(sorted(FROZEN)), times=TIMES)
    def renew(self, leaf: str, times: int) -> None:
        self.run.renew(leaf)
        self.save(times)

    @rule(leaves=LEAVES, times=TIMES)
    def train_others(self, leaves: set[str], times: int) -> None:
        self.run.moving = {"head", *leaves}
        self.save(times)

    @rule(times=TIMES)
    def change_after_each_call(self, times: int) -> None:
        self.save(times, HOST)

    @rule(
        number=st.sampled_from([errno.ENOSPC, errno.EIO]),
        stage=st.sampled_from(["write the arrays", "complete the step", "mark the step"]),
        times=TIMES,
    )
    def fail(self, number: int, stage: Stage, times: int) -> None:
        self.run.fail(number, stage)
        self.save(times)

    @rule(
        devices=st.sampled_from([8, 8, 4, 2]),
        reuse=st.sampled_from([ALL, True, "auto", False]),
        frozen=st.booleans(),
        times=TIMES,
    )
    def restart(self, times: int, **settings: Any) -> None:
        self.run.restart(**settings)
        self.save(times)

    @rule(index=st.integers(0, 5), times=TIMES)
    def back(self, index: int, times: int) -> None:
        if steps := self.run.ckpt.all_steps():
            self.run.back(steps[index % len(steps)])
            self.save(times)

    @rule(index=st.integers(0, 5), times=TIMES)
    def delete(self, index: int, times: int) -> None:
        if len(steps := self.run.ckpt.all_steps()) > 1:
            self.run.ckpt.delete(steps[index % (len(steps) - 1)])
            self.save(times)

    def teardown(self) -> None:
        with self.folder, self.run as run:
            run.check_each_alone()
            if run.local:
                run.check_each_alone("local")


@pytest.mark.slow
def test_any_sequence_of_changes_saves_and_restarts_stores_what_was_saved() -> None:
    # Without shrinking, which takes minutes.
    phases = [hypothesis.Phase.generate]
    settings = hypothesis.settings(max_examples=8, stateful_step_count=8, phases=phases)
    run_state_machine_as_test(AnySequence, settings=settings)
