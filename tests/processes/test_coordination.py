"""Processes speak to each other in rounds, which end alike on all of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.group import Group

from torchax_ckpt import errors
from torchax_ckpt.errors import (
    CorruptCheckpointError,
    MismatchError,
    ProcessError,
    ProcessTimeoutError,
    StepNotFoundError,
    UnusableStateError,
)
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.processes import coordination
from torchax_ckpt.processes.call_log import CallLog, Kind
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.processes.liveness import Liveness
from torchax_ckpt.processes.messages import POLL_SECS
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.state import per_process_state, training_state
from torchax_ckpt.state.component import Captured, Form
from torchax_ckpt.storage.arrays import block_digests


def test_process_0_gathers_and_shares() -> None:
    def act(member: Processes) -> tuple[Any, ...]:
        with member.round("testing"):
            gathered = member.gather(b"from %d" % member.index)
            shared = member.share(b"of %d" % member.index)
            return gathered, shared, member.first(lambda: {"index": member.index})

    first, *others = Group()(act)
    assert first == ([b"from 0", b"from 1", b"from 2"], b"of 0", {"index": 0})
    assert others == [([], b"of 0", {"index": 0})] * 2


def test_the_error_of_one_host_is_not_lost_where_process_0_has_ended_the_round() -> None:
    """Each host writes a directory of its own, so it has no value but its own."""
    is_over = threading.Event()

    def act(member: Processes) -> Any:
        with PerHostProcesses(member).round("saving", is_met=False) as outcome:
            if member.index == 1:
                is_over.wait(60)
                raise OSError("no space")
            outcome.value = member.index
        if member.is_first:
            is_over.set()
        return outcome.value

    first, failed, last = Group()(act)
    assert (first, last) == (0, 2)
    assert isinstance(failed, OSError)


@pytest.mark.parametrize("is_met", [True, False])
def test_the_verdict_on_a_round_carries_the_value_of_process_0(is_met: bool) -> None:
    def act(member: Processes) -> Any:
        with member.round("saving", is_met=is_met) as outcome:
            if member.is_first:
                outcome.value = [3, None]
        return outcome.value

    assert Group()(act) == [[3, None]] * 3


def test_process_0_ends_a_round_that_is_not_met_while_others_are_yet_to_come() -> None:
    has_ended = threading.Event()

    def act(member: Processes) -> Any:
        if not member.is_first:
            assert has_ended.wait(30)
        with member.round("tidying up", is_met=False) as outcome:
            outcome.value = member.index
        has_ended.set()
        return outcome.value

    assert Group()(act) == [0] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_a_round_that_is_not_met_fails_on_all_if_one_failed_before_its_end(failing: int) -> None:
    group = Group()
    kind = "failed" if failing else "verdict"

    def act(member: Processes) -> None:
        with member.round("saving", is_met=False):
            member.gather(b"written")
            if member.index == failing:
                raise OSError("no space")
            while not any(k.endswith(f"/{kind}/{failing}") for k in list(group.service.known)):
                time.sleep(0.01)

    told = group(act)
    assert isinstance(told.pop(failing), OSError)
    assert [str(error) for error in told] == [f"process {failing}: OSError: no space"] * 2


def test_one_process_speaks_to_nobody() -> None:
    with SINGLE_PROCESS.round("testing"):
        SINGLE_PROCESS.meet()
        assert SINGLE_PROCESS.gather(b"x") == [b"x"]
        assert SINGLE_PROCESS.share(b"x") == b"x"
        assert SINGLE_PROCESS.first(lambda: 3) == 3
    with pytest.raises(ValueError, match="as it is"), SINGLE_PROCESS.round("testing"):
        raise ValueError("as it is")


def failing(*errors: Exception | None, is_met: bool = False) -> list[Any]:
    """What each process raises of a round in which they fail, before they meet or after."""

    def act(member: Processes) -> None:
        with member.round("reading"):
            if is_met:
                member.meet()
            if (error := errors[member.index]) is not None:
                raise error
            if not is_met:
                member.meet()

    return Group()(act)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("is_met", [True, False])
def test_an_error_of_one_is_raised_by_all(index: int, is_met: bool) -> None:
    found = CorruptCheckpointError("the bytes differ", step=3, path="/run/3")
    errors_of_all: list[Any] = [None, None, None]
    errors_of_all[index] = found
    told = failing(*errors_of_all, is_met=is_met)
    assert told.pop(index) is found
    for error in told:
        assert type(error) is CorruptCheckpointError
        assert str(error) == f"process {index}: the bytes differ"
        assert (error.step, error.path) == (3, "/run/3")


def test_of_several_errors_all_raise_one() -> None:
    told = failing(None, CorruptCheckpointError("mine"), StepNotFoundError("mine"))
    assert {type(error) for error in told} == {CorruptCheckpointError}
    assert [str(error) for error in told] == ["process 1: mine", "mine", "process 1: mine"]


def test_an_error_is_told_with_its_kind_its_cause_and_its_step() -> None:
    told, *_ = failing(None, None, OSError(28, "No space left on device"))
    assert type(told) is ProcessError
    assert "process 2: OSError: [Errno 28] No space left on device" in str(told)
    unusable = UnusableStateError("gone")
    unusable.__cause__ = CorruptCheckpointError("damaged")
    told, *_ = failing(None, unusable, None)
    assert isinstance(told.__cause__, CorruptCheckpointError)
    told, *_ = failing(None, MismatchError("differs", missing=["model/w"], step=4), None)
    assert isinstance(told, MismatchError)
    assert told.step == 4
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.CheckpointError):
            assert type(failing(kind("told"), None, None, is_met=True)[1]) is kind, name


def without(missing: int, group: Group, late: float = 0) -> list[Any]:
    """What processes raise of a round to which one does not come; process 0 may meet them late."""

    def act(member: Processes) -> None:
        if member.index != missing:
            with member.round("saving step 7"):
                time.sleep(late * member.is_first)
                member.meet()

    began = time.monotonic()
    told = group(act)
    assert time.monotonic() - began < 60
    assert told.pop(missing) is None
    return told


@pytest.mark.parametrize(("missing", "late"), [(0, 0), (1, 0), (2, 0), (2, 2.5)])
def test_who_does_not_come_is_named(missing: int, late: float) -> None:
    """Not process 0, where that hangs while it waits for another."""
    for error in without(missing, Group(timeout_secs=1), late):
        assert isinstance(error, ProcessTimeoutError)
        assert f"saving step 7: process {missing} of 3 did not arrive" in str(error)


def test_at_a_timeout_one_process_alone_looks_who_is_missing() -> None:
    """Listings by all processes would grow with the square of their number."""
    group, listed = Group(timeout_secs=1), list[str]()
    listing = group.service.key_value_dir_get_bytes

    def counting(folder: str) -> list[tuple[str, bytes]]:
        listed.append(folder)
        return listing(folder)

    group.service.key_value_dir_get_bytes = counting  # type: ignore[method-assign]
    for error in without(0, group):
        assert "saving step 7: process 0 of 3 did not arrive" in str(error)
    assert sum(folder.endswith("/0/") for folder in listed) == 1


def test_if_the_one_that_looks_who_is_missing_dies_the_others_do_not_wait_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordination, "_LOOKING_SECS", 0.3)
    group, tried = Group(timeout_secs=1), list[str]()
    send = group.service.key_value_set_bytes

    def taken(key: str, *args: Any, **named: Any) -> None:
        send(key, *args, **named)
        if key.endswith("looked for"):
            tried.append(key)
            raise RuntimeError("this process dies")

    group.service.key_value_set_bytes = taken  # type: ignore[method-assign]
    said = [str(e) for e in without(0, group) if isinstance(e, ProcessTimeoutError)]
    assert len(tried) == 1
    assert ["saving step 7: process 0 of 3 did not arrive" in text for text in said] == [True]


class Ended(Liveness):
    """Knows that process 1 has ended."""

    def ended(self) -> dict[int, str]:
        return {1: "process 1 of 3, on host h1, died"}


def test_a_process_that_has_ended_is_named_unless_it_has_sent_its_message() -> None:
    def act(member: Processes) -> list[Any]:
        member.liveness = Ended()
        with member.round("reading"):
            if member.index == 2:
                time.sleep(0.8)
            sent = member.gather(b"sent")
            if member.index == 1:
                raise SystemExit
            member.meet()
        return sent

    group = Group()
    for member in group.members[1:2]:
        member._error_for_all = lambda error: error  # type: ignore[method-assign]  # says nothing

    def run(member: Processes) -> Any:
        try:
            return act(member)
        except SystemExit:
            return None

    began = time.monotonic()
    told = group(run)
    assert time.monotonic() - began < 25, "the timeout is 30 s"
    for error in (told[0], told[2]):
        assert type(error) is ProcessError
        assert "reading: process 1 of 3, on host h1, died. It can take" in str(error)


def test_who_comes_too_late_hears_how_it_ended_and_the_next_round_is_whole() -> None:
    group = Group(timeout_secs=1)

    def act(member: Processes) -> list[Any]:
        seen: list[Any] = []
        if member.index == 1:
            time.sleep(3)
        try:
            with member.round("first"):
                member.meet()
        except ProcessTimeoutError as error:
            seen.append(str(error))
        if member.index != 1:
            time.sleep(1.5)
        member.timeout_secs = 30
        with member.round("second"):
            seen.append(member.gather(b"%d" % member.index))
        return seen

    told = group(act)
    for seen in told:
        assert "first: process 1 of 3 did not arrive" in seen[0]
    assert told[0][1] == [b"0", b"1", b"2"]


def test_messages_are_deleted_once_all_have_come_to_the_next_round() -> None:
    group = Group()

    def act(member: Processes) -> None:
        for number in range(20):
            with member.round(f"round {number}"):
                member.gather(b"x" * 1000)
                member.share(b"y")

    assert group(act) == [None] * 3
    assert len({key.split("/")[1] for key in group.service.known}) <= 2
    assert len(group.service.known) < 20
    assert [len(member._rounds) for member in group.members] == [1] * 3


def test_two_saves_are_never_joined_into_one() -> None:
    def act(member: Processes) -> None:
        with member.round(f"saving step {10 + 2 * (member.index == 1)}"):
            member.first(lambda: None)

    told = Group(timeout_secs=1)(act)
    assert {type(error) for error in told} == {ProcessTimeoutError}
    assert "saving step 10: process 1 of 3 did not arrive" in str(told[0])
    assert "saving step 12: process 0 of 3 did not arrive" in str(told[1])


def test_the_threads_of_a_process_are_in_one_round_at_a_time() -> None:
    def act(member: Processes) -> list[Any]:
        def verify() -> list[bytes]:
            entered.wait(30)
            with member.round("verifying"):
                return member.gather(b"verified")

        entered = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            verified = pool.submit(verify)
            with member.round("loading"):
                entered.set()
                time.sleep(0.1)
                loaded = member.gather(b"loaded")
            return [loaded, verified.result(30)]

    assert Group()(act)[0] == [[b"loaded"] * 3, [b"verified"] * 3]


def test_reading_threads_and_the_training_wait_for_none_of_their_own_process() -> None:
    """Each process makes the calls in another order, and late: that is no difference of calls."""
    calls = {"restore": Kind.CALL, "verify": Kind.READ, "load": Kind.READ}

    def act(member: Processes) -> list[Any]:
        log = member.log = CallLog(member)

        def make(text: str) -> list[bytes]:
            with log.calling(text, calls[text]):
                for work in ("beginning", "reading"):
                    with member.round(work):
                        gathered = member.gather(text.encode())
            return gathered

        texts = [*calls][member.index :] + [*calls][: member.index]
        with ThreadPoolExecutor(3) as pool:
            made = {}
            for text in texts:
                made[text] = pool.submit(make, text)
                time.sleep(2 * POLL_SECS / len(texts))  # until one has looked what others call
            return [made[text].result() for text in calls]

    first, *others = Group(timeout_secs=3)(act)
    assert first == [[text.encode()] * 3 for text in calls]
    assert others == [[[]] * 3] * 2


def test_who_fails_while_it_waits_for_the_end_fails_the_round() -> None:
    """It has come there before the others, and has said so."""
    group = Group()
    wait = group.members[1]._wait

    def failing(key: str, secs: float) -> bytes | None:
        if "verdict" in key or "the end" in key:
            raise ProcessError("UNAVAILABLE")
        return wait(key, secs)

    group.members[1]._wait = failing  # type: ignore[method-assign]

    def act(member: Processes) -> None:
        with member.round("saving"):
            while member.index != 1 and not any(
                "/failed/1" in key for key in list(group.service.known)
            ):
                time.sleep(0.01)

    assert [str(error) for error in group(act)] == [
        "process 1: UNAVAILABLE",
        "UNAVAILABLE",
        "process 1: UNAVAILABLE",
    ]


class Interrupted(BaseException):
    """Ctrl-C."""


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("error", [ProcessError("UNAVAILABLE"), Interrupted()], ids=repr)
def test_a_round_that_has_ended_well_has_done_so_on_all(error: BaseException, is_met: bool) -> None:
    """Process 1 fails when the verdict is there, and has not read it."""
    group = Group()
    wait = group.members[1]._wait

    def late(key: str, secs: float) -> bytes | None:
        message = wait(key, secs)
        if message is not None and ("verdict" in key or "the end" in key):
            raise error
        return message

    group.members[1]._wait = late  # type: ignore[method-assign]

    def act(member: Processes) -> Any:
        try:
            with member.round("saving", is_met=is_met) as outcome:
                outcome.value = "saved"
        except Interrupted:
            return "interrupted"
        return outcome.value

    began = time.monotonic()
    expected = "interrupted" if isinstance(error, Interrupted) else "saved"
    assert group(act) == ["saved", expected, "saved"]
    assert time.monotonic() - began < 25


def test_who_saves_other_device_arrays_than_process_0_is_named() -> None:
    stored = {name: jnp.zeros(3) for name in ("model/w", "model/b")}

    def act(member: Processes) -> Any:
        here = {name: stored[name] for name in list(stored)[: 1 if member.index == 2 else 2]}
        taken = {name: Digests((3,), bytes(8), None) for name in here}
        with member.round("saving"):
            return block_digests.gathered(taken, here, {}, member)

    told = Group()(act)
    assert {type(error) for error in told} == {ProcessError}
    assert all("process 2 saves other device arrays than process 0" in str(e) for e in told)


def test_what_each_process_has_for_itself_goes_into_one_document() -> None:
    def captured(seed: int) -> dict[str, Captured]:
        node = {"dict": [["state", {"array": "rng/torch", "kind": "torch"}], ["n", seed]]}
        return {
            "model": Captured(Form({}, ("model/w",)), [np.zeros(3)]),
            "rng": Captured(Form(node, ("rng/torch",)), [np.full(2, seed, np.uint8)]),
        }

    assert training_state.split(captured(0))[0] == ["model/w"]
    sent = [training_state.split(captured(seed))[2].to_bytes() for seed in (4, 5, 4)]
    document, leaves = per_process_state.joined(sent[0], dict(enumerate(sent[1:], 1)))
    expected = {"rng/torch": [4, 4], "processes/1/rng/torch": [5, 5]}
    assert {name: leaf.tolist() for name, leaf in leaves.items()} == expected
    nodes = [per_process_state.document_of(document, i, 3, "step 1")["rng"] for i in range(3)]
    stored = [dict(node["dict"])["state"]["array"] for node in nodes]
    assert stored == ["rng/torch", "processes/1/rng/torch", "rng/torch"]  # 2 has what 0 has
    # If they are all alike, nothing is said of processes, and any number of them may restore it.
    assert per_process_state.joined(sent[0], {1: sent[2]})[0].keys() == {"rng"}
