"""s3:// beyond saves: Orbax, PyTorch, commands, copies, publications, tiers, two programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from etils import epath
from jax.sharding import NamedSharding
from s3_server import SIGNED, FaultyS3
from support.commands import run_json
from support.compare import assert_trees_identical, bits
from support.described import Tokenizer
from support.linked import by_orbax
from support.processes import Started
from support.steps import save, state, two_tiers
from support.training import P, fsdp_mesh, mlp
from support.waiting import wait_until

from torchax_ckpt import (
    TorchaxCheckpointer,
    policies,
    torchax_backend,
)
from torchax_ckpt.integrations.huggingface import Publisher
from torchax_ckpt.publishing import Reader, follower
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.published_folders import CONTROL
from torchax_ckpt.storage.medium import medium

pytest_plugins = ("s3_fixtures",)
pytestmark = pytest.mark.slow

KEEP_ALL: dict[str, Any] = {"preservation_policy": policies.PreserveAll()}


def save_numbers(place: Any, *steps: int) -> None:
    """Saves steps with an array that has the step's number."""
    with TorchaxCheckpointer(place, **KEEP_ALL) as ckpt:
        ckpt.attach(tokenizer=Tokenizer({"tokenizer.json": "{}"}), rng=False)
        for step in steps:
            numbers = {"p": {"w": np.full(4096, step, np.float32)}}
            ckpt.save(step, state=numbers, metrics={"loss": step}, force=True)


@pytest.mark.usefixtures("s3")
def test_orbax_alone_reads_a_step_that_was_downloaded(s3_url: str, tmp_path: Path) -> None:
    saved = {"w": jnp.arange(8.0), "half": jnp.full((3, 5), 0.1, jnp.bfloat16)}
    with TorchaxCheckpointer(s3_url) as ckpt:
        save(ckpt, 1, of=saved)
    (folder,) = epath.Path(s3_url).glob("incoming-1-*")
    for file in medium.of(folder).files(folder):
        here = tmp_path / "1" / file.name
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_bytes((folder / file.name).read_bytes())
    for arrays in by_orbax(epath.Path(tmp_path), 1):
        assert {n: bits(arrays[f"state/{n}"])[1:] for n in saved} == {
            n: bits(array)[1:] for n, array in saved.items()
        }


def test_a_run_is_published_from_a_bucket_and_to_one(
    s3: FaultyS3, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "POLL_SECS", 0.01)
    monkeypatch.setattr(follower, "GRACE_SECS", 0)
    out, model, reader = f"{s3_url}-out", mlp(), Reader(f"{s3_url}-out")
    settings: Any = {"format": "safetensors", "keep": 1}
    with TorchaxCheckpointer(s3_url) as ckpt, Publisher(ckpt, out, **settings):
        ckpt.attach(model)
        for step in (1, 2):
            with torch.no_grad():
                next(model.parameters()).fill_(step)
            save(ckpt, step, of=None)
            wait_until(lambda step=step: bool(reader.poll()) and reader.step == step)  # type: ignore[misc]
    assert len({n.split("/")[0] for n in s3.names(out)} - {"latest", CONTROL}) == 1
    here = tmp_path / "out"
    assert run_json("follow", s3_url, here, "--format", "safetensors", "--once")["step"] == 2
    assert (here / "latest").read_text() == "step-2\n"


def test_a_late_delete_spares_a_folder_that_was_published_again(
    s3: FaultyS3, s3_url: str, tmp_path: Path
) -> None:
    save_numbers(tmp_path / "run", 1)
    form = FolderForm(format="safetensors", at="state/p", max_shard_bytes=1 << 20)
    late: list[str] = []
    for hook in (late.append, None):
        with follower.Follower(tmp_path / "run", s3_url, form) as following:
            assert following.publish_due() is not None
        s3.hook = hook
        if hook:
            medium.of(epath.Path(s3_url)).remove_file(epath.Path(s3_url))
            s3.hook = None
    deletes = [r.partition(" ")[2] for r in late if r[:6] == "DELETE" and "/step-1" in r]
    assert deletes
    for request in deletes:
        assert s3.store.answer("DELETE", request, SIGNED, b"")[0] == 204
    assert (Reader(s3_url).poll()["w"] == 1).all()


def test_a_late_delete_spares_the_file_that_names_the_newest_folder(
    s3: FaultyS3, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_numbers(tmp_path / "run", 1)
    form = FolderForm(format="safetensors", at="state/p", max_shard_bytes=1 << 20)
    answer, late = s3.store.answer, list[Any]()

    def noting(method: str, path: str, headers: Any, body: bytes) -> Any:
        is_alone = path.endswith("/latest") and (method == "DELETE" or not body)
        if (is_alone and method in ("DELETE", "PUT")) or (method == "POST" and b"/latest<" in body):
            late.append((method, path, headers, body))
        return answer(method, path, headers, body)

    with follower.Follower(tmp_path / "run", s3_url, form) as following:
        assert following.publish_due() is not None
    for name in s3.names(s3_url):
        if name.startswith("step-1-"):  # as somebody does by hand
            s3.store.delete(f"{s3_url.removeprefix('s3://bucket/')}/{name}")
    monkeypatch.setattr(s3.store, "answer", noting)
    with follower.Follower(tmp_path / "run", s3_url, form) as following:
        assert following.publish_due() is not None
        assert late
        for request in late:
            answer(*request)
        assert (Reader(s3_url).poll()["w"] == 1).all()


@pytest.mark.usefixtures("s3")
def test_a_run_is_restored_in_every_form_and_goes_back_twice(s3_url: str) -> None:
    mesh = fsdp_mesh(4)
    rows = NamedSharding(mesh, P("fsdp"))
    model = torch.nn.Linear(8, 4).to("jax")
    with TorchaxCheckpointer(s3_url, **KEEP_ALL) as ckpt:
        ckpt.attach(model, rng=False)
        weights = {}
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight.add_(step)
            weights[step] = bits(model.weight)
            save(ckpt, step, of=None)
        ckpt.restore(2)
        assert bits(model.weight) == weights[2]
        save(ckpt, 3, of=None)
        ckpt.restore(1)
        assert bits(model.weight) == weights[1]
        save(ckpt, 2, of=None)
        assert ckpt.all_steps() == [1, 2]
    other = torch.nn.Linear(8, 4).to("jax")
    with TorchaxCheckpointer(s3_url) as ckpt:
        rule = lambda name, _: NamedSharding(mesh, P("fsdp") if name == "weight" else P())  # noqa: E731
        assert ckpt.attach(other, rng=False, shardings=rule) == 2
        assert bits(other.weight) == weights[1]
        assert torchax_backend.buffer(other.weight).sharding == rows
        save(ckpt, 3, of={"more": jnp.arange(8.0)})
        wanted = {"more": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows)}
        expected = {"more": jax.device_put(jnp.arange(8.0), rows)}
        assert_trees_identical(ckpt.load(3, abstract_state=wanted), expected)


@pytest.mark.usefixtures("s3")
def test_a_local_tier_beside_a_bucket_is_restored_and_replaced(s3_url: str, tmp_path: Path) -> None:
    with two_tiers(s3_url, tmp_path / "ram", durable=(2,)) as ckpt:
        save(ckpt, 1, 2, 3, force=False)
    with two_tiers(s3_url, tmp_path / "ram", durable=(2,)) as ckpt:
        assert ckpt.latest_step() == 3
        assert_trees_identical(ckpt.load(3), state(3))
    with two_tiers(s3_url, tmp_path / "lost", durable=(2,)) as ckpt:
        assert ckpt.latest_step() == 2
        assert_trees_identical(ckpt.load(2), state(2))


COUNTING = """
import sys, time
from etils import epath
from torchax_ckpt.errors import LeaseError
from torchax_ckpt.storage.directory.lease import Lease
run, rounds, refused = epath.Path(sys.argv[1]), int(sys.argv[2]), 0
me, other = sys.argv[3:]
(run / me).write_text("is here")
while not (run / other).exists():
    time.sleep(0.005)
while rounds:
    lease = Lease(run)
    try:
        lease.hold()
    except LeaseError:
        refused += 1
        time.sleep(0.005)
        continue
    counter = run / "counter"
    count = int(counter.read_text())
    time.sleep(0.005)
    counter.write_text(str(count + 1))
    lease.release()
    rounds -= 1
print(refused)
"""


@pytest.mark.parametrize("server", ["s3", "ministack"])
def test_of_two_programs_one_holds_the_lease_in_each_of_200_rounds(
    server: str, s3_url: str, request: pytest.FixtureRequest
) -> None:
    s3: FaultyS3 = request.getfixturevalue(server)
    (counter := epath.Path(s3_url) / "counter").write_text("0")
    both = [
        Started("-c", COUNTING, s3_url, "100", *names, env=s3.environment())
        for names in (("one", "two"), ("two", "one"))
    ]
    ends = [program.result(200) for program in both]
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 2
    assert counter.read_text() == "200"
    assert sum(int(end.stdout) for end in ends) > 20  # they met
