"""What gs:// and s3:// promise alike, on servers of both."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from etils import epath
from gcs_server import FaultyServer
from jax.sharding import NamedSharding
from support.commands import run, run_json
from support.compare import bits
from support.described import Tokenizer
from support.linked import by_orbax
from support.models import Tuned
from support.native import run_native, run_ranks, save_net
from support.steps import save
from support.training import P, fsdp_mesh

from torchax_ckpt import (
    CheckpointOptions,
    Event,
    TorchaxCheckpointer,
    load_torch_state_dict,
    policies,
    torchax_backend,
)
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import LeaseError
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.lease import Lease
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord, Conflict, Seen
from torchax_ckpt.stored.copy import copy_steps
from torchax_ckpt.stored.stored_step import StoredStep

pytest_plugins = ("gcs_fixtures", "s3_fixtures")

# Fixtures of servers: emulators in this process, and servers that the tests do not change.
INDEPENDENT_GCS = pytest.param("independent", marks=pytest.mark.slow)
INDEPENDENT_S3 = pytest.param("ministack", marks=pytest.mark.slow)
ALL = ["gcs", INDEPENDENT_GCS, "s3", INDEPENDENT_S3]
ALL_BUT_ONE = ["gcs", "s3", INDEPENDENT_S3]  # one deletes whatever is there
KEEP_ALL: dict[str, Any] = {"preservation_policy": policies.PreserveAll()}
# The names of steps; none of those in s3:// is ever used again.
NAME = {
    "gs": re.compile(r"(?:incoming-|(abandoned-))?(\d+)(?:-\d+)?"),
    "s3": re.compile(r"(?:incoming-|(abandoned-))(\d+)-\d{15}"),
}


@dataclasses.dataclass(frozen=True)
class Store:
    """A server, and the URL of a prefix of its own in the server's bucket."""

    server: FaultyServer
    url: str

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    def folders(self, run: str = "") -> list[str]:
        """The folders of a run's steps."""
        names = {name.split("/")[0] for name in self.server.names(run or self.url)}
        return sorted(names - {"lease", "events"})

    def steps(self, run: str = "") -> list[str]:
        """The steps, as "3" or "abandoned-3", and whatever else there is."""
        matches = {name: NAME[self.scheme].fullmatch(name) for name in self.folders(run)}
        return sorted((m[1] or "") + m[2] if m else f"{n}?" for n, m in matches.items())

    def record(self, name: str) -> AtomicRecord:
        return medium.of(epath.Path(self.url)).record(epath.Path(self.url) / name)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    server = request.getfixturevalue(request.param)
    url = request.getfixturevalue("url" if request.param in ("gcs", "independent") else "s3_url")
    return Store(server, url)


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_a_run_is_saved_pruned_resumed_resharded_and_goes_back_twice(store: Store) -> None:
    first, reader = torch.nn.Linear(8, 4).to("jax"), TorchaxCheckpointer(store.url)
    keep, requests = policies.LatestN(2), list[str]()
    store.server.hook = requests.append
    with TorchaxCheckpointer(store.url, preservation_policy=keep) as ckpt:
        assert ckpt.all_steps() == []
        assert ckpt.attach(first) == 0
        for step in (1, 2, 3):
            ckpt.save(step, metrics={"loss": step}, force=True)
        with pytest.raises(LeaseError, match="this very process"):
            TorchaxCheckpointer(store.url).save(9, state={"n": np.ones(1)}, force=True)
    store.server.hook = None
    assert ckpt.all_steps() == reader.all_steps() == [2, 3]
    assert store.steps() == ["2", "3"]
    if store.scheme == "gs":  # nothing is deleted but what was looked at
        deletes = [request for request in requests if re.match("DELETE .*%2F1%2F", request)]
        assert len(deletes) > 5
        assert [request for request in deletes if "ifGenerationMatch=" not in request] == []
    mesh = fsdp_mesh(4)
    second = torch.nn.Linear(8, 4).to("jax")
    with TorchaxCheckpointer(store.url) as ckpt:
        rule = lambda name, _: NamedSharding(mesh, P("fsdp") if name == "weight" else P())  # noqa: E731
        assert ckpt.attach(second, shardings=rule) == 3
        assert len(torchax_backend.buffer(second.weight).sharding.device_set) == 4
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert bits(a) == bits(b)
        assert ckpt.metrics(3) == {"loss": 3}
        for _ in range(2):  # a new step takes a number that an abandoned one has
            ckpt.restore(2)
            ckpt.save(3, force=True)
            ckpt.wait_until_finished()
            assert ckpt.all_steps() == [2, 3]
    read_only = CheckpointOptions(read_only=True)
    assert TorchaxCheckpointer(store.url, options=read_only).all_steps() == [2, 3]
    assert store.steps() == ["2", "3", "abandoned-3", "abandoned-3"]
    aside = [name for name in store.folders() if name.startswith("abandoned-")]
    assert sorted(run_json("ls", store.url)["abandoned"]) == aside
    assert run_json("prune", store.url, "--abandoned", "--delete")["freed_bytes"] > 0
    assert store.steps() == ["2", "3"]
    assert store.record("lease").read() is None


# --- who writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ALL_BUT_ONE, indirect=True)
def test_of_two_that_saw_the_same_record_one_replaces_it(store: Store) -> None:
    record = store.record("record")
    assert record.read() is None
    first = record.swap(None, b"1")
    with pytest.raises(Conflict):
        record.swap(None, b"2")
    second = record.swap(first, b"2")
    with pytest.raises(Conflict):
        record.swap(first, b"3")
    record.remove(first)
    assert record.read() == second
    assert record.swap(first, b"2") == second  # sent again after its answer was lost
    record.remove(second)
    assert record.read() is None


@pytest.mark.parametrize("store", ["gcs", "s3"], indirect=True)
def test_a_write_whose_answer_was_lost_is_recognised(store: Store) -> None:
    record, server = store.record("lease"), store.server
    record.remove(record.swap(None, b"the first one tries the server"))
    server.kinds, server.concerned = ("reset after",), r"^(PUT|POST) "
    requests: list[str] = []

    def lose_the_first(request: str) -> None:
        requests.append(request)
        server.rate = 1.0 if len(requests) == 1 else 0.0

    seen = None
    for content in (b"first", b"second"):
        requests.clear()
        server.hook = lose_the_first
        seen = record.swap(seen, content)
        server.hook = None
        assert len(requests) > 1  # it was sent again
        assert record.read() == seen
        assert seen.content == content
    with pytest.raises(Conflict):
        record.swap(None, b"third")


@pytest.mark.parametrize("store", ["gcs", "s3"], indirect=True)
def test_a_lease_whose_renewal_was_stored_without_an_answer_is_still_held(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, kind = Lease(epath.Path(store.url)), type(store.record("lease"))
    swap = kind.swap
    lease.hold()

    def without_answer(*args: Any) -> Seen:
        swap(*args)
        raise OSError("no answer")

    def renew_without_answer() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(kind, "swap", without_answer)
            lease.renew()

    renew_without_answer()
    lease.hold()
    renew_without_answer()
    lease.renew()
    lease.hold()
    lease.release()
    assert store.record("lease").read() is None


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_of_many_that_replace_a_record_at_once_one_succeeds(
    store: Store, request: pytest.FixtureRequest
) -> None:
    records = [store.record("lease") for _ in range(8)]
    seen = None
    for turn in range(200 if "ministack" in request.node.name else 10):
        won: list[tuple[int, Seen]] = []
        begin = threading.Barrier(len(records))

        def swap(i: int, seen: Seen | None = seen, turn: int = turn) -> None:
            begin.wait()  # noqa: B023 - each turn ends before the next
            with contextlib.suppress(Conflict):
                won.append((i, records[i].swap(seen, f"{turn} of {i}".encode())))  # noqa: B023

        threads = [threading.Thread(target=swap, args=(i,)) for i in range(len(records))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((winner, taken),) = won
        assert records[0].read() == taken
        assert taken.content == f"{turn} of {winner}".encode()
        seen = taken
        if turn % 2:
            records[winner].remove(taken)
            seen = None


# --- who reads -----------------------------------------------------------------------------------


def two_programs(place: str) -> None:
    """One saves two steps, the other a third, which it deletes."""
    with TorchaxCheckpointer(place, **KEEP_ALL) as ckpt:
        ckpt.attach(tokenizer=Tokenizer({"tokenizer.json": "{}"}), rng=False)
        for step in (1, 2):
            state = {"p": {"w": np.full(4096, step, np.float32)}}
            ckpt.save(step, state=state, metrics={"loss": step}, force=True)
    with TorchaxCheckpointer(place, preservation_policy=policies.LatestN(3)) as ckpt:
        ckpt.save(3, state={"p": {"w": np.zeros(4096)}}, force=True)
        ckpt.delete(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "store", [pytest.param("gcs", marks=pytest.mark.long), "s3"], indirect=True
)
def test_commands_and_copies_work_on_a_bucket(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target, local = store.url, f"{store.url}-copy", tmp_path / "run"
    two_programs(url)
    runs = run_json("report", url, page := tmp_path / "report.html")["runs"]
    assert [(run["num_durable"], run["last_step"]) for run in runs] == [(2, 2), (1, 3)]
    assert "durable saves" in page.read_text()
    assert run_json("ls", url)["steps"][1]["kept_by"] == ["LatestN(3)", "newest"]
    assert run_json("plan", "--run", url)["checkpoint_bytes"] > 4096
    assert "state/p/w" in run("show", f"{url}/2")

    assert run_json("verify", url, 2)["steps"][0]["marked"]
    listed = run_json("ls", url)["steps"]
    assert [(s["step"], s["verified"]) for s in listed] == [(1, False), (2, True)]
    assert all(s["size_bytes"] > 4096 for s in listed), listed
    differ = "diff", f"{url}/1", url, "--filter", "state/p/*"
    assert run_json(*differ, code=exit_codes.FOUND)["leaves"][0]["max_abs"] == 1.0
    assert run_json("copy", f"{url}/1", target)["steps"] == [1]
    assert (load_torch_state_dict(target, at="state/p")["w"] == 1).all()
    assert run_json("copy", url, local)["steps"] == [1, 2]
    assert run_json("verify", local, "--all")["steps"][1]["ok"]
    copied = copy_steps([RunDirectory(local).candidates(2)[-1]], RunDirectory(f"{url}-by-code"))
    assert [committed.step for committed in copied] == [2]
    assert run_json("copy", local / "2", target)["steps"] == [2]
    for place in (url, local, target, f"{url}-by-code"):
        stored = StoredStep(RunDirectory(place, read_only=True).candidates(2)[-1])
        assert stored.read_assets() == {"tokenizer/tokenizer.json": "{}"}
        assert not run_json("diff", f"{url}/2", place)["leaves"]
    for place in (local, target):
        assert not run_json("diff", f"{url}/1", f"{place}/1")["leaves"]
    how = "--format", "safetensors", "--at", "state/p", "--once"
    published = tmp_path / "published"
    assert run_json("follow", url, published, *how, "--best", "loss")["step"] == 1
    assert run_json("follow", url, published, *how)["step"] == 2
    assert (published / "latest").read_text() == "step-2\n"
    kept = run_json("prune", url, "--policy", "LatestN(1)", "--delete")["kept"]
    assert kept == [2]
    assert store.steps() == ["2"]
    assert len(store.server.names(f"{url}/events")) == 2  # an object for each program
    assert store.record("lease").read() is None
    assert store.steps(target) == ["1", "2"]
    assert [n for n in store.server.names(target) if re.search(r"2(-\d+)?/commit_success.txt", n)]
    look = array_checks.require_stored

    def look_while_it_is_deleted(path: Any, *rest: Any) -> Any:
        (path / commit_record.MARK).unlink()
        (path / "state").rmtree()  # the rest of it is still there
        return look(path, *rest)

    monkeypatch.setattr(array_checks, "require_stored", look_while_it_is_deleted)
    assert "step 1 was deleted meanwhile" in run("verify", target, 1, code=exit_codes.USAGE)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["gcs", "s3"], indirect=True)
def test_ranks_one_process_and_dcp_of_plain_pytorch_load_to_the_bit(
    store: Store, tmp_path: Path
) -> None:
    save_net(tmp_path, run=store.url)
    assert run_ranks("adamw-fsdp", 2, tmp_path, RUN=store.url) == ["", ""]
    source = """
assert restore(sys.argv[2], *(objects := built())).step == 2
require_equal(state_of(*objects), expected)
model = built()[0]
weights = {"model": model.state_dict()}
dcp.load(weights, storage_reader=StorageReader(sys.argv[2]), planner=LoadPlanner(), no_dist=True)
model.load_state_dict(weights["model"])
require_equal(model.state_dict(), objects[0].state_dict())
"""
    run_native(source, tmp_path, store.url)


# --- frozen arrays -------------------------------------------------------------------------------


def unchanged(store: Store, folder: str) -> dict[str, str]:
    """The objects of a step's databases of frozen arrays, and their generations."""
    prefix = store.url.partition("://bucket/")[2] + f"/{folder}/state/ocdbt.process_unchanged"
    found: dict[str, str] = store.server.store.generations(prefix)
    return found


@pytest.mark.parametrize(
    "store", ["gcs", pytest.param("s3", marks=pytest.mark.slow), INDEPENDENT_S3], indirect=True
)
def test_what_is_frozen_is_uploaded_once_and_every_step_is_complete_by_itself(
    store: Store,
) -> None:
    options = CheckpointOptions(reuse=True)
    model, events, sent = Tuned(1024).to("jax"), list[Event](), list[int]()
    for programs_steps in ((1, 2, 3), (4,)):  # also after a restart
        with TorchaxCheckpointer(
            store.url, options=options, on_event=events.append, **KEEP_ALL
        ) as ckpt:
            ckpt.attach(model)
            for step in programs_steps:
                before = store.server.uploaded_bytes
                with torch.no_grad():
                    model.head.weight.add_(step)
                save(ckpt, step, of=None)
                sent.append(store.server.uploaded_bytes - before)
    trained = sum(parameter.nbytes for parameter in model.head.parameters())
    assert sent[0] > 2 * trained
    assert max(sent[1:]) < 1.1 * trained
    durable = [event.values for event in events if event.name == "durable"][:3]
    copied = [values["num_bytes"] - values["new_bytes"] for values in durable]
    assert [nbytes > 1 << 20 for nbytes in copied] == [False, True, True]
    sizes = [values["num_bytes"] for values in durable]
    assert [values["total_bytes"] for values in durable] == [*itertools.accumulate(sizes)]
    if store.scheme == "gs":
        assert not any(unchanged(store, "3").items() & unchanged(store, "2").items())
    for committed in RunDirectory(store.url).steps()[:-1]:
        medium.of(committed.path).remove_file(committed.path)  # all below it
    other = Tuned(1024).to("jax")
    assert TorchaxCheckpointer(store.url).attach(other) == 4
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(a) == bits(b)
    if store.scheme == "gs":  # Orbax finds no step in s3:// by its number
        buffers = {n: torchax_backend.buffer(p) for n, p in model.named_parameters()}
        expected = {f"model/{n}": np.asarray(a).tobytes() for n, a in buffers.items()}
        for arrays in by_orbax(epath.Path(store.url), 4):
            assert {name: arrays[name].tobytes() for name in expected} == expected
