"""Which parts of a step hosts take back when they have not all come to have one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
from support.group import Group

from torchax_ckpt.errors import ProcessError, ProcessTimeoutError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import commit_part


def committed(group: Group, commit: Callable[[int], None]) -> tuple[list[Any], set[int], set[int]]:
    """What each of three hosts gets that commit parts of a step, which have one, and lose it."""
    have, lose = set[int](), set[int]()
    # None is asked for its part before all have come to theirs.
    here = threading.Barrier(3)

    def act(member: Processes) -> None:
        def own() -> int:
            here.wait(60)
            commit(member.index)
            have.add(member.index)
            return member.index

        with member.round("saving step 1"):
            assert commit_part(member, own, lose.add) == member.index

    return group(act), have, lose


def test_where_all_have_their_parts_none_is_taken_back() -> None:
    assert committed(Group(), lambda index: None) == ([None] * 3, {0, 1, 2}, set())


@pytest.mark.parametrize("failing", [0, 2])
def test_a_part_is_taken_back_where_another_host_says_that_it_has_none(failing: int) -> None:
    def commit(index: int) -> None:
        if index == failing:
            raise OSError("no space")

    told, have, lose = committed(Group(), commit)
    assert isinstance(told.pop(failing), OSError)
    assert all(isinstance(error, ProcessError) and "no space" in str(error) for error in told)
    assert have == lose == {0, 1, 2} - {failing}


def test_parts_stay_where_the_first_host_has_died() -> None:
    group = Group()

    def unavailable(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    def commit(index: int) -> None:
        if index == 0:  # with it goes the service that all speak through
            for call in ("key_value_set_bytes", "blocking_key_value_get_bytes"):
                setattr(group.service, call, unavailable)
            group.service.key_value_dir_get_bytes = unavailable  # type: ignore[method-assign]

    told, have, lose = committed(group, commit)
    assert all(isinstance(error, ProcessError | jax.errors.JaxRuntimeError) for error in told)
    assert (have, lose) == ({0, 1, 2}, set())


@pytest.mark.slow
def test_parts_stay_where_another_host_says_nothing() -> None:
    group, is_over = Group(timeout_secs=5), threading.Event()

    def commit(index: int) -> None:
        if index == 2:
            is_over.wait(60)

    threading.Timer(15, is_over.set).start()
    told, have, lose = committed(group, commit)
    assert all(isinstance(error, ProcessTimeoutError) for error in told)
    assert (have, lose) == ({0, 1, 2}, set())
