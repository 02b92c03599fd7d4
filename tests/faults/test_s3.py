"""s3://: save, prune, resume, reshard, go back; late and lost answers; permissions; who writes."""

from __future__ import annotations

import collections
import fnmatch
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from etils import epath
from s3_server import SIGNED, FaultyS3
from support.compare import assert_trees_identical
from support.models import Tuned
from support.steps import save, state
from support.training import save_state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import DirectoryError, LeaseError
from torchax_ckpt.publishing import follower
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.storage.directory.lease import Lease
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.s3 import s3_medium, service

pytest_plugins = ("s3_fixtures",)

ALL = policies.PreserveAll()
READING = CheckpointOptions(read_only=True)


def test_a_delete_that_is_carried_out_late_spares_a_step_saved_again_with_equal_bytes(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(s3_url, preservation_policy=ALL) as ckpt:
        save(ckpt, 1, 2)
        before = {name for name in s3.names(s3_url) if name.startswith("incoming-2-")}
        late: list[str] = []
        s3.hook = lambda request: late.append(request) if request[:6] == "DELETE" else None
        ckpt.delete(2)
        s3.hook = None
        assert not before & set(s3.names(s3_url))
        save(ckpt, 2)
        deletes = [r for r in late if "/incoming-2-" in r]
        assert len(deletes) >= len(before) > 5
        for request in deletes:  # each once more, whatever its condition was
            path = request.partition(" ")[2]
            assert s3.store.answer("DELETE", path, SIGNED, b"")[0] == 204
        assert ckpt.all_steps() == [1, 2]
        assert_trees_identical(ckpt.load(2), state(2))
        after = {name for name in s3.names(s3_url) if name.startswith("incoming-2-")}
        assert {n.split("/")[0] for n in before}.isdisjoint(n.split("/")[0] for n in after)


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        ("PUT If-None-Match", "If-None-Match of PutObject"),
        ("PUT If-Match", "If-Match of PutObject"),
    ],
)
def test_a_server_that_ignores_a_condition_is_refused_for_writing(
    s3: FaultyS3, s3_url: str, ignored: str, said: str
) -> None:
    s3.store.ignored = {ignored}
    with (
        pytest.raises(DirectoryError, match=f"does not heed the condition {said}, so that two"),
        TorchaxCheckpointer(s3_url) as ckpt,
    ):
        ckpt.attach(rng=False)
        save(ckpt, 1)
    assert s3.names(s3_url) == []
    assert TorchaxCheckpointer(s3_url, options=READING).all_steps() == []


def test_a_server_that_ignores_conditions_of_deletes_serves_one_program_at_a_time(
    s3: FaultyS3, s3_url: str
) -> None:
    s3.store.ignored = {"DELETE If-Match"}
    for step in (1, 2):
        with TorchaxCheckpointer(s3_url) as ckpt:
            save(ckpt, step, of=state(step))
            with pytest.raises(LeaseError), TorchaxCheckpointer(s3_url) as other:
                save(other, 9, of=state(9))
    assert TorchaxCheckpointer(s3_url, options=READING).all_steps() == [1, 2]


def test_nothing_is_published_where_a_condition_is_ignored_or_unknown(
    s3: FaultyS3, s3_url: str, tmp_path: Path
) -> None:
    save_state(tmp_path / "run", state(1))
    form = FolderForm(format="safetensors", at="state", max_shard_bytes=1 << 20)
    s3.store.ignored = {"PUT If-None-Match"}
    following = follower.Follower(tmp_path / "run", s3_url, form)
    with pytest.raises(DirectoryError, match="does not heed the condition If-None-Match of Put"):
        following.publish_due()
    with pytest.raises(DirectoryError, match="does not heed the condition"):  # of compiled programs
        medium.of(epath.Path(s3_url)).record(epath.Path(s3_url) / "programs").swap(None, b"zip")
    s3.store.ignored, s3.kinds, s3.concerned = set(), ("501",), r"^PUT .*conditions"
    requests: list[str] = []

    def refuse_all_but_one(request: str) -> None:  # which has no condition
        if request.startswith("PUT") and "conditions" in request:
            requests.append(request)
        s3.rate = float(len(requests) > 1)

    s3.hook = refuse_all_but_one
    with pytest.raises(DirectoryError, match="does not heed the condition If-None-Match of Put"):
        following.publish_due()
    s3.hook = None
    s3.calm()
    assert all("/.torchax_ckpt_conditions-" in name for name in s3.names(s3_url))
    following.close()


def test_an_answer_that_is_lost_while_conditions_are_tried_does_no_harm(
    s3: FaultyS3, s3_url: str
) -> None:
    requests: collections.Counter[str] = collections.Counter()

    def lose_every_other(request: str) -> None:
        requests[request] += 1
        s3.rate = float(requests[request] % 2)

    s3.kinds, s3.concerned, s3.hook = ("reset after",), "conditions", lose_every_other
    lease = Lease(epath.Path(s3_url))
    lease.hold()
    assert s3.counts["reset after"] == 4  # of three writes and a delete
    lease.release()
    s3.hook = None
    assert s3.names(s3_url) == ["lease"]
    assert s3.store.get(f"{s3_url.removeprefix('s3://bucket/')}/lease") == b""


@pytest.mark.slow
def test_another_server_that_ignores_conditions_is_refused_for_writing(
    s3rver: FaultyS3, s3_url: str
) -> None:
    with (
        pytest.raises(DirectoryError, match="does not heed the condition If-None-Match"),
        TorchaxCheckpointer(s3_url) as ckpt,
    ):
        save(ckpt, 1)


def test_a_missing_permission_or_bucket_is_named_and_reading_needs_none_to_write(
    s3: FaultyS3, s3_url: str
) -> None:
    with TorchaxCheckpointer(s3_url) as ckpt:
        save(ckpt, 1)
    s3.lacking = {"s3:PutObject", "s3:DeleteObject"}
    with TorchaxCheckpointer(s3_url, options=READING) as reader:
        assert_trees_identical(reader.load(1), state(1))
    for lacking in ("s3:PutObject", "s3:DeleteObject", "s3:ListBucket"):
        s3.lacking = {lacking}
        with pytest.raises(DirectoryError, match=f"it lacks {lacking}, or its credentials are"):
            TorchaxCheckpointer(s3_url)
    s3.lacking = {"s3:GetObject"}
    both = "expected TensorStore.*s3fs found its credentials by 'env', TensorStore by 'environment'"
    for options in (READING, CheckpointOptions()):
        with pytest.raises(DirectoryError, match=f"{both}.*s3:GetObject"):
            TorchaxCheckpointer(s3_url, options=options)
    s3.calm()
    with pytest.raises(DirectoryError, match=f"no bucket 'else'.*{s3.url}.*aws s3 mb s3://else"):
        TorchaxCheckpointer("s3://else/run")


def test_a_bucket_may_be_a_directory_and_tells_its_steps_from_other_objects(
    s3: FaultyS3, s3_url: str
) -> None:
    assert s3.store.answer("PUT", "/bare", {}, b"")[0] == 200
    model = torch.nn.Linear(2, 2).to("jax")
    with TorchaxCheckpointer("s3://bare", preservation_policy=ALL) as ckpt:
        ckpt.attach(model)
        save(ckpt, 1, 2, of=None)
        ckpt.restore(1)
        save(ckpt, 2, of=None)
        ckpt.delete(1)
    with TorchaxCheckpointer("s3://bare", options=READING) as reader:
        assert reader.attach(model) == 2
    (epath.Path(s3_url) / "incoming-mail" / "1").write_bytes(b"a letter")
    (epath.Path(s3_url) / "incoming-1-2" / "1").write_bytes(b"another")
    TorchaxCheckpointer(f"{s3_url}/7").close()
    (epath.Path(s3_url) / "incoming-1-123456789012345" / "x").write_bytes(b"of a copied step")
    for run in (s3_url, "s3://bare"):
        with pytest.raises(DirectoryError, match=f"found no such step; the run is {run}"):
            TorchaxCheckpointer(f"{run}/7")


def move(command: str) -> None:
    """Does what ``aws s3 mv`` does, whose filters match whole keys, the last one first."""
    *words, source, target = shlex.split(command.partition(" --exclude ")[0])
    excluded, *included = [*shlex.split(command)[6:]][1::2]
    assert (words, excluded) == (["aws", "s3", "mv", "--recursive"], "*")
    for file in medium.of(epath.Path(source)).files(epath.Path(source)):
        if any(fnmatch.fnmatchcase(f"{source}{file.name}", source + each) for each in included):
            path = epath.Path(source) / file.name
            (epath.Path(target) / file.name).write_bytes(path.read_bytes())
            path.unlink()


def test_a_run_in_a_step_is_got_out_by_the_command_that_the_warning_names(
    s3: FaultyS3, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(s3_url) as ckpt:
        save(ckpt, 2)
    with TorchaxCheckpointer(f"{s3_url}-inner") as ckpt:
        save(ckpt, 5)
    (step,) = (name.split("/")[0] for name in s3.names(s3_url) if name.endswith("success.txt"))
    prefix = s3_url.removeprefix("s3://bucket/")
    for name in s3.names(f"{s3_url}-inner"):
        s3.store.put(f"{prefix}/{step}/{name}", s3.store.get(f"{prefix}-inner/{name}"))
    TorchaxCheckpointer(f"{s3_url}/{step}").close()
    (told,) = (text for text in caplog.messages if "with the steps 5 of another run" in text)
    move(told.partition("a directory of its own: ")[2])
    assert_trees_identical(TorchaxCheckpointer(f"{s3_url}-{step}").load(5), state(5))
    assert_trees_identical(TorchaxCheckpointer(s3_url).load(2), state(2))
    with pytest.raises(DirectoryError, match="expected the directory of a run, found a step"):
        TorchaxCheckpointer(f"{s3_url}/{step}")


def test_a_check_that_could_not_delete_its_object_is_in_nobodys_way(
    s3: FaultyS3, s3_url: str, tmp_path: Path
) -> None:
    save_state(tmp_path / "run", {"p": state(1)})
    form = FolderForm(format="safetensors", at="state/p", max_shard_bytes=1 << 20)
    s3.lacking = {"s3:DeleteObject"}
    for _ in range(2):
        with pytest.raises(DirectoryError, match="lacks s3:DeleteObject"):
            TorchaxCheckpointer(f"{s3_url}/run")
    with follower.Follower(tmp_path / "run", f"{s3_url}/out", form) as following:
        with pytest.raises(DirectoryError, match="lacks s3:DeleteObject"):
            following.publish_due()
        assert len(s3.names(s3_url)) == 3
        s3.calm()
        assert following.publish_due() is not None
    with TorchaxCheckpointer(f"{s3_url}/run") as ckpt:
        save(ckpt, 1)
    assert not [name for name in s3.names(f"{s3_url}/run") if "probe" in name]


def test_an_object_that_goes_while_a_reader_looks_at_it_is_no_reason_to_refuse_the_reader(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = epath.Path(s3_url) / "a"
    place.write_bytes(b"content")
    name = str(place).removeprefix("s3://bucket/")

    def delete(request: str) -> None:
        if request.startswith(f"GET /bucket/{name}") and s3.store.names(name):
            s3.store.delete(name)

    s3.hook = delete
    TorchaxCheckpointer(s3_url, options=READING).close()
    assert s3.store.names(name) == []
    place.write_bytes(b"content")
    s3.hook, kvstore = None, service.kvstore
    monkeypatch.setattr(service, "kvstore", lambda url: {**kvstore(url), "path": "elsewhere/"})
    for options in (READING, CheckpointOptions()):
        with pytest.raises(DirectoryError, match="TensorStore found no such object"):
            TorchaxCheckpointer(s3_url, options=options)


def test_a_reader_fetches_the_start_of_an_object_and_passes_over_an_empty_one(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, most = s3.store.answer, 0

    def counting(*args: Any) -> Any:
        nonlocal most
        found = answer(*args)
        most = max(most, len(found[2]))
        return found

    monkeypatch.setattr(s3.store, "answer", counting)
    for content in (bytes(1 << 20), b""):
        (epath.Path(s3_url) / "a").write_bytes(content)
        TorchaxCheckpointer(s3_url, options=READING).close()
    assert most < 1 << 16


def test_what_comes_in_pieces_is_read_up_to_the_limit(s3: FaultyS3, s3_url: str) -> None:
    place, content = epath.Path(s3_url) / "a", bytes(range(256)) * 256
    place.write_bytes(content)
    s3.rate_of = lambda *_: 400_000.0
    for limit in (None, 1 << 20, 40_000, 0):
        assert medium.of(place).read(place, limit) == content[:limit]


@pytest.mark.slow
def test_frozen_arrays_are_copied_within_the_service_also_in_parts(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_medium, "COPIED_AT_ONCE_BYTES", 1000)
    requests: list[str] = []
    options = CheckpointOptions(reuse=True)
    with TorchaxCheckpointer(s3_url, options=options, preservation_policy=ALL) as ckpt:
        ckpt.attach(Tuned().to("jax"))
        for step in (1, 2):
            s3.hook = requests.append if step == 2 else None
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
        s3.hook = None
    assert [r for r in requests if "uploadId=" in r and "partNumber=" in r]
    with TorchaxCheckpointer(s3_url) as ckpt:
        assert ckpt.attach(Tuned().to("jax")) == 2


def test_an_object_is_copied_in_parts_of_a_size(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_medium, "COPIED_AT_ONCE_BYTES", 1000)
    monkeypatch.setattr(s3_medium, "PART_BYTES", 5 << 20)
    content = bytes(range(256)) * (11 << 12)  # two parts, and a smaller one
    prefix = s3_url.removeprefix("s3://bucket/")
    s3.store.put(f"{prefix}/from/a", content)
    source, target = epath.Path(s3_url) / "from", epath.Path(s3_url) / "to"
    medium.of(source).take_over(source, target)
    assert s3.store.get(f"{prefix}/to/a") == content
    with pytest.raises(FileNotFoundError):
        medium.of(source).take_over(epath.Path(s3_url) / "nothing", target)


def test_a_lease_of_a_bucket_that_is_gone_is_an_error_at_once(s3: FaultyS3) -> None:
    assert s3.store.answer("PUT", "/brief", {}, b"")[0] == 200
    lease = Lease(epath.Path("s3://brief/run"))
    lease.hold()
    lease.release()
    for path in ("/brief/run/lease", "/brief"):
        assert s3.store.answer("DELETE", path, SIGNED, b"")[0] == 204
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        lease.hold()
