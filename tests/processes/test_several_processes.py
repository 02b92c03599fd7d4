"""Several processes: one state, saved and restored together, resumed bit for bit."""

from __future__ import annotations

import ipaddress
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes_program import digest
from support.group import TRAIN
from support.processes import run_processes

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend

STRAIGHT = (
    TRAIN
    + """
    from processes_program import listening

    assert training.attach(ckpt) == 0
    train(1, 8)
    report(listening=listening())
    ckpt.close()
    assert ckpt.all_steps() == [4, 8]
"""
)

# In other processes, from another seed. Then what one process meets, all do.
RESUMED = (
    TRAIN
    + """
    import os, pathlib, re, time, warnings
    import jax
    import numpy as np
    from etils import epath
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from processes_program import INDEX
    from torchax_ckpt import errors
    from torchax_ckpt.storage.arrays import block_digests, locate_chunk

    def told(call, *args, **kwargs):
        before = training.whole(), training.own()
        try:
            call(*args, **kwargs)
        except errors.CheckpointError as error:
            return [type(error).__name__, str(error), (training.whole(), training.own()) == before]

    assert training.attach(ckpt) == 8
    report(whole=training.whole(), own=training.own())
    assert ckpt.restore(4).step == 4
    train(5, 8)                                   # goes back: saves another step 8
    ckpt.wait_until_finished()

    # A disk is full, on process 1.
    take = block_digests.take
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    block_digests.take = full if INDEX == 1 else take
    training.step()
    assert ckpt.save(9, force=True)
    failure = told(ckpt.wait_until_finished)
    block_digests.take = take
    assert ckpt.save(9, force=True)               # tried again, on both
    ckpt.wait_until_finished()
    # User code cannot say what to save, on process 1: the other does not wait for it in vain.
    give = training.loader.state_dict
    def unsaid():
        raise ValueError("cannot say")
    training.loader.state_dict = unsaid if INDEX == 1 else give
    training.step()
    began = time.monotonic()
    unsaid = []
    for call in (lambda: ckpt.save(10, force=True), ckpt.wait_until_finished):
        try:                                      # not told(): what that compares is gathered
            call()
        except Exception as error:
            unsaid += [type(error).__name__, str(error)]
    unsaid_secs = time.monotonic() - began
    training.loader.state_dict = give
    assert ckpt.save(10, force=True)              # the same step, once it can be said
    ckpt.wait_until_finished()
    files = sorted(os.listdir(directory))

    # User code refuses, on process 1.
    load = training.loader.load_state_dict
    def refuse(state):
        load(state)
        if INDEX == 1 and state["position"] == 9:
            raise ValueError("not mine")
    training.loader.load_state_dict = refuse
    refused = told(ckpt.restore, 9)
    training.loader.load_state_dict = load

    verified = ckpt.verify(9)
    ckpt.delete(8)

    # In the newest step a byte is damaged that only process 1 reads.
    with ckpt._processes.round("damaging"):
        if INDEX == 0:
            state = epath.Path(directory) / "10" / "state"
            place = locate_chunk.place_of_chunk(state, "model.0.weight", [3, 0])
            path, first = re.fullmatch("(.*), bytes ([0-9]+) to [0-9]+", place).groups()
            assert "ocdbt.process_1" in path
            raw = bytearray(pathlib.Path(path).read_bytes())
            raw[int(first) + 40] ^= 1
            pathlib.Path(path).write_bytes(raw)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        restored = ckpt.restore()
    report(
        failure=failure, files=files, unsaid=unsaid, unsaid_secs=unsaid_secs,
        refused=refused, verified=verified,
        restored=[restored.step, *restored.skipped_steps], is_verified=restored.is_verified,
        warned=[str(w.message) for w in warned], steps=ckpt.all_steps(),
        damaged=told(ckpt.verify, 10), missing=told(ckpt.restore, 77),
    )
    training.step()
    ckpt.save(11, force=True)

    # Data-parallel replicas over slices, saved to another directory at the same time.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("slice", "fsdp"))
    def spread(shape, *spec):
        host = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, P(*spec)), lambda index: host[index])
    signs = spread((4, 4), "fsdp")                # zeros of both signs, and NaNs, in every width
    signs = jax.numpy.where(signs > 0, -0.0, jax.numpy.where(signs < -1, jax.numpy.nan, signs))
    state = {
        "w": spread((512, 512), "fsdp"), "odd": spread((3,)), "here": jax.numpy.arange(5.0),
        **{t: signs.astype(t) for t in ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool")},
    }
    slices = TorchaxCheckpointer(
        directory + "-slices", options=CheckpointOptions(read_back=True, process_timeout_secs=60))
    slices.save(1, state=state, force=True)
    ckpt.close()
    slices.close()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    from torchax_ckpt.storage.arrays import read_arrays
    read = []
    arrival = read_arrays._Arrival
    read_arrays._Arrival = lambda committed, target, piece, store: (
        read.append(piece.nbytes), arrival(committed, target, piece, store))[1]
    for single in (False, True):
        read.clear()
        options = CheckpointOptions(single_replica_restore=single, process_timeout_secs=60)
        found = TorchaxCheckpointer(directory + "-slices", options=options).load(1, abstract)
        for name, array in state.items():
            assert found[name].sharding == array.sharding
            for a, b in zip(found[name].addressable_shards, array.addressable_shards, strict=True):
                assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), name
        report(single=single, read=sum(read))
    written = [
        sum(f.stat().st_size for f in pathlib.Path(
            directory + "-slices", "1", "state", f"ocdbt.process_{i}", "d").iterdir())
        for i in (0, 1)]
    report(steps=ckpt.all_steps(), written=written, nbytes=state["w"].nbytes)
"""
)

WIDER = (
    TRAIN
    + """
    import warnings

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert training.attach(ckpt) == 8
    report(
        whole=training.whole(), own=training.own(), warned=[str(w.message) for w in warned])
    train(9, 12)
    assert ckpt.restore(8).step == 8
    train(9, 12)
    train(13, 14)
    ckpt.close()
"""
)

AGAIN = (
    TRAIN
    + """
    import warnings

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert training.attach(ckpt) == 12
    report(
        whole=training.whole(), own=training.own(), warned=[str(w.message) for w in warned])
    train(13, 14)
    ckpt.save(14, force=True)
    ckpt.wait_until_finished()
    assert ckpt.verify() == 14
    ckpt.close()
"""
)

# The policy's interval is what the clocks would part the processes over.
SKEWED = """
    import sys, time
    from processes_program import Training, report
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

    directory, seed, secs, last = sys.argv[4], *map(int, sys.argv[5:8])
    training = Training(seed)
    ckpt = TorchaxCheckpointer(
        directory,
        options=CheckpointOptions(process_timeout_secs=60),
        save_decision_policy=policies.ContinuousCheckpointingPolicy(minimum_interval_secs=secs),
        preservation_policy=policies.PreserveAll(),
    )
    start = training.attach(ckpt)
    restored = training.whole(), training.own()
    saved = []
    for step in range(start + 1, last + 1):
        training.step()
        if ckpt.save(step):
            saved.append(step)
            ckpt.wait_until_finished()
            kept = training.whole(), training.own()
    ckpt.close()
    ahead = time.time() - time.clock_gettime(time.CLOCK_REALTIME)
    report(start=start, restored=restored, saved=saved, kept=kept, ahead=ahead)
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run of 8 steps on 2 processes x 2 devices, with steps 4 and 8, and what each reported."""
    run = tmp_path_factory.mktemp("straight") / "run"
    return run, [report | sockets for report, sockets in run_processes(STRAIGHT, 2, str(run), "0")]


@pytest.fixture(scope="module")
def wider(
    straight: tuple[Path, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """The same run, gone on with by 4 processes, with steps 4, 8 and 12, and what each reported."""
    run = tmp_path_factory.mktemp("wider") / "run"
    shutil.copytree(straight[0], run)
    return run, run_processes(WIDER, 4, str(run), "5")


def test_two_processes_resume_bit_for_bit_and_fail_alike(
    straight: tuple[Path, list[Any]], directory: Path
) -> None:
    run, expected = straight
    shutil.copytree(run, directory)
    resumed = run_processes(RESUMED, 2, str(directory), "77")
    for (attached, again, outcome, _, _, end), whole in zip(resumed, expected, strict=True):
        assert (attached["whole"], attached["own"]) == (whole["whole"], whole["own"])
        assert (again["whole"], again["own"]) == (whole["whole"], whole["own"])
        assert again["seen"] == whole["seen"][4:]
        kind, message, _ = outcome["failure"]
        assert kind == "SaveError"
        assert "No space left on device" in message
        assert "cannot say" in outcome["unsaid"][-1]
        assert outcome["unsaid_secs"] < 30, "process_timeout_secs is 60"
        assert outcome["files"] == ["10", "4", "8", "9", "abandoned-8", "events", "lease"]
        kind, message, is_unchanged = outcome["refused"]
        assert (kind, is_unchanged) == ("MismatchError", True)
        assert "not mine" in message
        assert outcome["verified"] == 9
        assert outcome["restored"] == [9, 10]
        assert outcome["is_verified"]
        assert "skipping an unreadable checkpoint" in outcome["warned"][0]
        assert outcome["steps"] == [4, 9, 10]
        assert outcome["damaged"][0] == "CorruptCheckpointError"
        assert outcome["missing"][0] == "StepNotFoundError"
        assert end["steps"] == [4, 9, 11]
        # Both slices have all of it; each has written half, from its own devices.
        for nbytes in end["written"]:
            assert end["nbytes"] / 2 <= nbytes < end["nbytes"] * 0.6
    kinds = [outcome["unsaid"][::2] for _, _, outcome, *_ in resumed]
    assert kinds == [["SaveError"], ["ValueError", "SaveError"]]
    # Slice by slice, or one for both: what the second does not read came over the devices' network.
    (*_, each_0, one_0, end), (*_, each_1, one_1, _) = resumed
    assert each_0["read"] >= end["nbytes"] <= each_1["read"]
    assert one_0["read"] == each_0["read"]
    assert one_1["read"] < end["nbytes"] / 100
    # Each process has a state of its own; else little was shown.
    assert expected[0]["own"] != expected[1]["own"]
    assert expected[0]["seen"] != expected[1]["seen"]


def test_nothing_listens_on_every_address(straight: tuple[Path, list[Any]]) -> None:
    """JAX's coordination service is on loopback; gloo goes where the host's name leads, no further.

    JAX has no setting for where gloo listens.
    """
    _, reports = straight
    own = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)}
    assert reports[0]["listening"], "the coordination service was not seen"
    for report in reports:
        for address in report["listening"]:
            assert ipaddress.ip_address(address).is_loopback or address in own


def test_other_numbers_of_processes_restore_it(
    straight: tuple[Path, list[Any]], wider: tuple[Path, list[Any]]
) -> None:
    (_, expected), (directory, reports) = straight, wider
    for index, (attached, first, again, _) in enumerate(reports):
        assert attached["whole"] == expected[0]["whole"]
        assert attached["own"] == expected[index % 2]["own"]
        assert first == again
        if index == 0:
            (warned,) = attached["warned"]
            assert "was saved by 2 processes and is restored by 4" in warned
            assert "dataloader, rng" in warned
            assert "processes 2 to 3 go on as others do" in warned
    # This process alone, with eight devices, reads what four have written.
    with (
        TorchaxCheckpointer(directory) as ckpt,
        pytest.warns(UserWarning, match="processes 1 to 3 are left out"),
    ):
        loaded = ckpt.load(12)
    for name, value in loaded["model"].items():
        assert digest(np.asarray(torchax_backend.buffer(value))) == reports[0][2]["whole"][name]
    assert loaded["dataloader"]["position"] == 12


@pytest.mark.parametrize("count", [4, 2])
def test_what_four_processes_saved_is_resumed_by_as_many_and_by_fewer(
    count: int, wider: tuple[Path, list[Any]], directory: Path
) -> None:
    run, reports = wider
    shutil.copytree(run, directory)
    resumed = run_processes(AGAIN, count, str(directory), "77")
    for (attached, after), (*_, expected, beyond) in zip(resumed, reports[:count], strict=True):
        assert attached["whole"] == expected["whole"]
        assert attached["own"] == expected["own"]
        if count == 4:
            assert attached["warned"] == []
            assert after == beyond
        else:
            assert after["whole"] == resumed[0][1]["whole"]
    if count == 2:
        (warned,) = resumed[0][0]["warned"]
        assert "was saved by 4 processes and is restored by 2" in warned
        assert "processes 2 to 3 are left out" in warned


@pytest.mark.long
def test_a_clock_that_is_wrong_parts_nobody(directory: Path) -> None:
    def run(skew_secs: int, interval_secs: int, *, last: int) -> list[Any]:
        arguments = str(directory), "0", str(interval_secs), str(last)
        env = {"SKEW_SECS": str(skew_secs)}
        # Fresh: what is imported finds the clock wrong.
        results = run_processes(SKEWED, 2, *arguments, env=env, fresh=True)
        reports = [report for (report,) in results]
        assert [round(report["ahead"]) for report in reports] == [0, skew_secs]
        return reports

    # An hour ahead, process 1 would take every save for overdue; there is one within the interval.
    before = run(3600, 1800, last=6)
    assert [report["saved"] for report in before] == [[1], [1]]
    # An hour behind, it would save nothing until its clock has reached that of step 1.
    after = run(-3600, 0, last=12)
    for found, expected in zip(after, before, strict=True):
        assert found["start"] == 1
        assert found["restored"] == expected["kept"]
        assert found["saved"] == after[0]["saved"]
        assert len(found["saved"]) > 1


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        CheckpointOptions(single_replica_restore=True, restore_in_budget=True)
    for secs in (None, 0, -1.0, float("inf"), True, "1"):
        with pytest.raises(ValueError, match="process_timeout_secs: expected a positive number"):
            CheckpointOptions(process_timeout_secs=secs)  # type: ignore[arg-type]


LOADED_ON_A_THREAD = """
    import sys, threading
    from processes_program import INDEX, report
    import torchax, numpy as np
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer

    torchax.enable_globally()
    for name, settings in {
        "plain": dict(),
        "one reads for all": dict(
            options=CheckpointOptions(single_replica_restore=True, process_timeout_secs=60)
        ),
        "a local tier": dict(local=LocalTier(f"{sys.argv[4]}/ramdisk-{INDEX}")),
    }.items():
        with TorchaxCheckpointer(f"{sys.argv[4]}/{name}", **settings) as ckpt:
            ckpt.save(1, state={"w": np.arange(3)}, force=True)
            ckpt.wait_until_finished()
            found = []

            def load():
                try:
                    found.append(ckpt.load()["w"].tolist())
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")

            thread = threading.Thread(target=load, name="other")
            thread.start()
            thread.join()
            report(name=name, found=found[0], here=ckpt.load()["w"].tolist())
"""


def test_load_belongs_to_the_training_thread_where_processes_send_each_other_what_they_read(
    tmp_path: Path,
) -> None:
    for reports in run_processes(LOADED_ON_A_THREAD, 2, str(tmp_path)):
        found = {told["name"]: told["found"] for told in reports}
        assert found.pop("plain") == [0, 1, 2]
        assert len(found) == 2
        for refused in found.values():
            assert refused.startswith("CallError: load was called on thread 'other'")
        assert [told["here"] for told in reports] == [[0, 1, 2]] * 3


DIFFERING = """
    import sys
    from processes_program import report
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer

    directory = sys.argv[4]
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    host = np.arange(4096, dtype=np.float32).reshape(64, 64)
    pieces = [  # what a cosmic ray, or a collective without an order, leaves of one that was alike
        jax.device_put(host + (device.process_index == 1), device)
        for device in jax.local_devices()
    ]
    array = jax.make_array_from_single_device_arrays(
        host.shape, NamedSharding(mesh, P()), pieces)
    options = CheckpointOptions(read_back=True, process_timeout_secs=60)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state={"w": array}, force=True)
        ckpt.wait_until_finished()
        ckpt.verify(1)
        report(steps=ckpt.all_steps())
"""


def test_replicas_that_differ_are_stored_as_each_process_has_its_part(directory: Path) -> None:
    for (told,) in run_processes(DIFFERING, 2, str(directory)):
        assert told == {"steps": [1]}
    loaded = np.asarray(TorchaxCheckpointer(directory).load(1)["w"])
    expected = np.arange(4096, dtype=np.float32).reshape(64, 64)
    expected[32:] += 1
    np.testing.assert_array_equal(loaded, expected)
