"""Snapshots: what a save holds on to, and that donation never makes a wrong checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.device_memory import limited
from support.stages import Gate, at
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.devices import move_shards
from torchax_ckpt.devices.sharding import LateParts, replicas, shards_of
from torchax_ckpt.errors import DonatedBufferError, SaveError
from torchax_ckpt.options import SnapshotMode
from torchax_ckpt.snapshot import snapshotter
from torchax_ckpt.snapshot.planner import Planner
from torchax_ckpt.snapshot.snapshotter import Snapshotter
from torchax_ckpt.storage.writing import array_writer

double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
fresh = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))


# JAX crashes if a thread deletes an array on a CPU in the moment in which another looks at it.
_looking = threading.Lock()


def deleting(tree: Any) -> Any:
    """As on a device: on CPU, an array is not donated while numpy looks at it."""
    result = fresh(tree)
    with _looking:
        for leaf in jax.tree.leaves(tree):
            leaf.delete()
    return result


def start() -> dict[str, jax.Array]:
    return {f"layers.{i}.w": jnp.full((64, 64), float(i + 1)) for i in range(3)}


def assert_as_it_was(ckpt: TorchaxCheckpointer, step: int) -> None:
    loaded = ckpt.load(step)
    for name, first in start().items():
        assert np.array_equal(loaded[name], np.asarray(first) * np.float32(2.0**step))


def run(directory: Path, step_fn: Any, options: CheckpointOptions, steps: int = 6) -> None:
    """Trains, saves every step, and checks that every one holds what was there then."""
    state = start()
    with TorchaxCheckpointer(
        directory, options=options, preservation_policy=policies.PreserveAll()
    ) as ckpt:
        for step in range(1, steps + 1):
            state = step_fn(state)
            ckpt.save(step, state=state, force=True)
        ckpt.wait_until_finished()
    assert ckpt.all_steps() == list(range(1, steps + 1))
    for step in ckpt.all_steps():
        assert_as_it_was(ckpt, step)


@pytest.mark.parametrize("mode", ["copy", "reference"])
def test_a_deleted_leaf_among_many_is_never_saved(directory: Path, mode: SnapshotMode) -> None:
    state = {f"layers.{i}.w": jnp.full((2,), float(i)) for i in range(300)}
    state["layers.7.w"].delete()  # not one of those that save asks at once
    lost = pytest.raises((DonatedBufferError, SaveError), match=r"state/layers\.7\.w: its buffer")
    options = CheckpointOptions(snapshot=mode)
    with lost, TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state)
    assert ckpt.all_steps() == []


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing falls behind the training, now before and now after it has looked at the leaves."""
    start = array_writer._start_fetch
    looks, writes = itertools.cycle([0.0, 0.03, 0.002]), itertools.cycle([0.0, 0.01, 0.002, 0.03])

    def started(*given: Any) -> Any:
        fetch = start(*given)

        def locked() -> Any:
            with _looking:
                return fetch()

        return locked

    monkeypatch.setattr(array_writer, "_start_fetch", started)
    at("stack the arrays", lambda: time.sleep(next(looks)))
    at("write the arrays", lambda: time.sleep(next(writes)))


donating = pytest.mark.parametrize("step_fn", [double, deleting], ids=["donated", "deleted"])
# "auto" stacks arrays as small as these.
LAYOUTS = [pytest.param("auto", marks=pytest.mark.long), "flat"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.slow
@donating
@layouts
@pytest.mark.parametrize("mode", ["auto", "copy", "offload", "transfer"])
def test_donated_buffers_are_saved_as_they_were(
    mode: Any, layout: Any, step_fn: Any, directory: Path, busy: None
) -> None:
    options = CheckpointOptions(snapshot=mode, layout=layout)
    run(directory, step_fn, options)


@donating
@layouts
def test_a_donated_reference_is_saved_as_it_was_or_not_at_all(
    layout: Any, step_fn: Any, directory: Path, busy: None
) -> None:
    """Training runs ahead of the storage without waiting for anything."""
    options = CheckpointOptions(snapshot="reference", layout=layout)
    ckpt = TorchaxCheckpointer(
        directory, options=options, preservation_policy=policies.PreserveAll()
    )
    began = []
    state = start()
    for step in range(1, 61):
        state = step_fn(state)
        if ckpt.save(step, state=state):
            began.append(step)
        time.sleep(0.004)
    ckpt.save(61, state=(state := step_fn(state)), force=True)  # nothing comes after it
    ckpt.close()
    failures = ckpt._saver.tier.failures.unread
    assert failures
    assert all(isinstance(failure.__cause__, DonatedBufferError) for failure in failures)
    # Equal failures are reported once, so that not every step that failed is among them.
    assert {61} <= set(ckpt.all_steps()) < {*began, 61}
    for step in ckpt.all_steps():
        assert_as_it_was(ckpt, step)


@donating
@layouts
def test_a_reference_donated_before_it_was_looked_at_fails_that_save(
    layout: Any, step_fn: Any, directory: Path
) -> None:
    gate = Gate("stack the arrays")
    options = CheckpointOptions(snapshot="reference", layout=layout)
    ckpt = TorchaxCheckpointer(directory, options=options)
    state = step_fn(start())
    ckpt.save(1, state=state)
    state = step_fn(state)
    gate.opened.set()
    with pytest.raises(SaveError, match=r"step 1 .*state/layers\.0\.w: its buffer was") as caught:
        ckpt.wait_until_finished()
    assert isinstance(caught.value.__cause__, DonatedBufferError)
    assert caught.value.key_path == "state/layers.0.w"
    assert ckpt.all_steps() == []
    assert ckpt.save(2, state=state, force=True)
    ckpt.close()
    assert ckpt.all_steps() == [2]
    assert_as_it_was(ckpt, 2)


@pytest.mark.parametrize(("step_fn", "later"), [(double, "copy"), (fresh, "reference")])
def test_auto_copies_while_the_program_donates(
    step_fn: Any, later: str, caplog: pytest.LogCaptureFixture
) -> None:
    snapshotter = Snapshotter("auto", "auto")
    state = start()
    names = [f"state/{n}" for n in state]
    ways = []
    with caplog.at_level(logging.DEBUG, logger="torchax_ckpt"):
        for _ in range(3):
            ways.append(snapshotter.take(names, list(state.values())).way)
            state = step_fn(state)
        snapshotter.donated()
        ways.append(snapshotter.take(names, list(state.values())).way)
    assert ways == ["copy", later, later, "copy"]
    assert caplog.text.count("snapshots are taken by copy: the program donates") == 1


@pytest.mark.parametrize(
    ("mode", "free_bytes", "reason"),
    [
        *((mode, 0, "the options require it") for mode in get_args(SnapshotMode) if mode != "auto"),
        ("auto", 1 << 30, "the next save will show"),
        ("auto", 0, "no memory for copies"),
    ],
)
def test_the_way_of_snapshots_is_said_once(
    mode: Any, free_bytes: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = limited(free_bytes) if mode == "auto" else None
    snapshotter = Snapshotter(mode, "auto", *filter(None, [memory]))
    state = start()
    with caplog.at_level(logging.DEBUG, logger="torchax_ckpt"):
        for _ in range(1 if mode == "auto" else 2):
            snapshotter.take([f"state/{n}" for n in state], list(state.values()))
    # A collection of garbage may have other things logged.
    (said,) = [text for text in caplog.messages if text.startswith("snapshots are taken by")]
    way = mode if mode != "auto" else "copy" if free_bytes else "transfer"
    assert said.startswith(f"snapshots are taken by {way}: ")
    assert reason in said


@pytest.mark.slow
@donating
@layouts
def test_auto_loses_one_save_to_a_program_that_begins_to_donate(
    layout: Any, step_fn: Any, directory: Path
) -> None:
    gate = Gate("stack the arrays")
    gate.opened.set()
    ckpt = TorchaxCheckpointer(
        directory,
        options=CheckpointOptions(layout=layout),
        preservation_policy=policies.PreserveAll(),
    )
    state = start()
    for step in range(1, 8):
        state = (fresh if step <= 4 else step_fn)(state)
        if step == 5:  # what was saved at step 4 is gone before it is looked at
            gate.opened.set()
            ckpt._saver.wait()
        if step == 4:
            ckpt.wait_until_finished()
            gate.opened.clear()
        ckpt.save(step, state=state, force=True)
    ckpt.close()
    with pytest.raises(SaveError, match="step 4 ") as caught:
        ckpt.check_for_errors()
    assert isinstance(caught.value.__cause__, DonatedBufferError)
    ckpt.check_for_errors()
    assert ckpt.all_steps() == [1, 2, 3, 5, 6, 7]
    for step in ckpt.all_steps():
        assert_as_it_was(ckpt, step)


def test_a_transfer_holds_the_training_thread_until_everything_is_fetched_or_failed(
    directory: Path,
) -> None:
    order: list[str] = []

    def transfer_late() -> None:
        time.sleep(0.3)
        order.append("transferring")
        if order.count("transferring") == 2:
            raise OSError("no")

    at("write the arrays", transfer_late)
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="transfer"))
    for step in (1, 2):
        assert ckpt.save(step, state=start(), force=True)
        order.append("returned")
    with pytest.raises(SaveError):
        ckpt.close()
    assert order == ["transferring", "returned"] * 2


def test_threads_that_plan_at_the_same_time_get_each_the_plan_of_its_own_leaves() -> None:
    planner = Planner("auto")
    tier = {"other": jnp.ones(3)}

    class Interrupted(list[str]):
        """Names; while they are compared, another thread plans."""

        def __eq__(self, other: object) -> bool:
            planner(list(tier), list(tier.values()))
            return super().__eq__(other)

    state = start()
    expected = Planner("auto")(list(state), list(state.values())).plan
    planner(list(state), list(state.values()))
    assert planner(Interrupted(state), list(state.values())).plan == expected
    assert planner(list(state), list(state.values())).plan == expected


class Listed:
    """An array whose buffers JAX lists as given, each time otherwise."""

    def __init__(self, array: jax.Array, *lists: Any) -> None:
        self.sharding, self.shape, self._lists = array.sharding, array.shape, iter(lists)

    @property
    def _arrays(self) -> Any:
        return next(self._lists)


def test_shards_that_jax_lists_twice_or_not_yet_are_returned_once() -> None:
    """Another thread may look at the array while a save does: JAX keeps what is listed twice."""
    array: Any = jax.device_put(np.arange(64.0), NamedSharding(fsdp_mesh(), P("fsdp")))
    buffers = array._arrays
    listed: Any = Listed(
        array, buffers[:3], buffers[:4] * 2, [*buffers[:2], *buffers, *buffers[2:]]
    )
    found = [(s.device, s.index, np.asarray(s.data).tobytes()) for s in shards_of(listed)]
    assert found == [
        (s.device, s.index, np.asarray(s.data).tobytes()) for s in array.addressable_shards
    ]
    never: Any = Listed(array, *[buffers[:1] * 8] * 1000)
    with pytest.raises(RuntimeError, match="lists 1 shards of an array that lies on 8 devices"):
        shards_of(never)


@pytest.mark.parametrize("looks", ["shards_of", "stack", "value"])
def test_threads_that_look_at_arrays_at_the_same_time_are_each_given_all(looks: str) -> None:
    """Two tiers, or the program; JAX alone gives one of them a part, or another device's shard."""
    sharding = NamedSharding(fsdp_mesh(), P("fsdp"))
    begin = threading.Barrier(2, timeout=30)
    arrays: list[jax.Array] = []

    def look() -> None:
        for _ in range(20):
            begin.wait()
            for array in arrays:
                with contextlib.suppress(IndexError):  # the other thread of JAX alone
                    shards_of(array) if looks != "value" else array.addressable_data(7)
            begin.wait()

    def found() -> list[bytes]:
        if looks == "shards_of":
            each = [sorted(shards_of(a), key=lambda shard: shard.index[0].start) for a in arrays]
            return [b"".join(np.asarray(s.data).tobytes() for s in shards) for shards in each]
        parts = LateParts.of(arrays)
        rows = [parts.members(offset) for offset in sorted(parts)]
        return [b"".join(row.tobytes() for row in member) for member in zip(*rows, strict=True)]

    thread = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    values = [np.arange(64.0, dtype=np.float32) + number for number in range(64)]
    wrong = 0
    try:
        thread.start()
        for _ in range(20):
            arrays[:] = [jax.device_put(value, sharding) for value in values]
            begin.wait()
            wrong += found() != [value.tobytes() for value in values]
            begin.wait()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert not wrong


# --- programs that run on devices ---


def compiled_in(messages: list[str]) -> set[str]:
    """The names of the functions that JAX has compiled."""
    found = (re.match(r"Compiling (?:jit\()?([\w<>]+)", message) for message in messages)
    return {match[1] for match in found if match}


@pytest.mark.parametrize("mode", ["copy", "offload", "reference", "transfer"])
def test_saving_and_restoring_compile_nothing_else(
    mode: Any,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshotter, "stacks_on_host", lambda arrays: False)
    # Of shapes that nothing else here compiles programs for.
    width = {"copy": 37, "reference": 41, "transfer": 43, "offload": 47}[mode]
    rows = NamedSharding(fsdp_mesh(), P("fsdp"))
    state: dict[str, Any] = {
        f"{dtype}.{i}": jax.device_put(np.zeros((8, width), dtype), rows)
        for dtype in ("float32", "bfloat16", "bool", "int8", "complex64", "float8_e8m0fnu")
        for i in range(2)
    }
    state["scalar"] = jax.device_put(np.float32(1))
    state["key"] = jax.random.split(jax.random.key(0), width)
    options = CheckpointOptions(snapshot=mode)
    onto = {
        **state,
        "float32.0": jax.device_put(state["float32.0"], NamedSharding(fsdp_mesh(), P())),
    }
    torchax_backend.check_internals()  # runs once in a process, when the first checkpointer is made
    jax.config.update("jax_log_compiles", True)  # jax.log_compiles() is for one thread
    try:
        with TorchaxCheckpointer(directory, options=options) as ckpt:
            ckpt.save(1, state=state, metrics={"loss": state["scalar"]})
            ckpt.wait_until_finished()
            ckpt.load(1, onto)
        final = NamedSharding(fsdp_mesh(), P())
        leaves: dict[str, Any] = {"scalar": jax.device_put(np.float32(1), replicas(final)[0])}
        target = jax.ShapeDtypeStruct((), np.float32, sharding=final)
        move_shards.sum_over_replicas(leaves, {"scalar": target})
    finally:
        jax.config.update("jax_log_compiles", False)
    found = compiled_in(caplog.messages)
    assert ("checkpoint_offload" if mode == "offload" else "checkpoint_stack") in found
    assert {name for name in found if not name.startswith("checkpoint_")} == set()
