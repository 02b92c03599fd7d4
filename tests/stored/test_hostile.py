"""A checkpoint from elsewhere is data: whatever it holds, it is refused by name or it is restored.

Most tests damage step 2 of a run that they share. The reader of steps refuses what no program could
restore; a restore by the step's number refuses the rest, and changes nothing. ``attach`` takes step
1 then, in five cases. tests/layout/test_manifest.py tests the parser of manifests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import torch
from orbax.checkpoint import v1 as ocp
from support.compare import assert_trees_identical, training_state
from support.damage import edit_json
from support.models import Box
from support.steps import save_states
from support.training import adamw, mlp, resume, save, train_step

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    OutOfMemoryError,
    StepNotFoundError,
    UnsupportedLeafError,
)
from torchax_ckpt.layout.manifest import MAX_DEPTH
from torchax_ckpt.options import Codec
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.storage.arrays import tensorstore_context
from torchax_ckpt.storage.directory.commit_record import MARK
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import permissions, seals
from torchax_ckpt.storage.writing import array_writer
from torchax_ckpt.stored.stored_step import StoredStep
from torchax_ckpt.telemetry.journal import FOLDER

DAMAGED = 2
Change = Callable[[Any], None]


class Program:
    """What a run attaches: a model, an optimizer that has stepped, a scheduler, a box."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.box = Box({"seen": 3, "table": np.arange(6.0), "set": {np.float32(1.5)}})

    def attach(self, ckpt: TorchaxCheckpointer, **options: Any) -> int:
        return ckpt.attach(
            self.model,
            self.optimizer,
            lr_scheduler=self.scheduler,
            stateful={"box": self.box},
            **options,
        )

    def train(self, step: int) -> None:
        train_step(self.model, self.optimizer, step)
        self.scheduler.step()
        self.box.state["seen"] += 1

    def state(self) -> list[Any]:
        rng = [torch.get_rng_state(), torchax_backend.prng_key(), np.random.get_state(legacy=False)]
        attached = training_state(self.model, self.optimizer)
        return [attached, self.scheduler.state_dict(), self.box.state, *rng]


class Hostile:
    """Steps 1 and 2 of a run, and one checkpointer that reads them, however they are damaged."""

    def __init__(self, path: Path) -> None:
        self._live, self._sound = path / "live", path / "sound"
        self.run = self._live / "run"
        self.step = self.run / str(DAMAGED)
        self.program = Program()
        with TorchaxCheckpointer(self.run, preservation_policy=policies.PreserveAll()) as ckpt:
            self.program.attach(ckpt)
            for step in (1, DAMAGED):
                self.program.train(step)
                ckpt.save(step, force=True, metrics={"loss": 1.0 / step})
        self.program.train(DAMAGED + 1)
        shutil.copytree(self._live, self._sound)
        self.ckpt = TorchaxCheckpointer(self.run)
        self.program.attach(self.ckpt, resume=False)

    def repair(self) -> None:
        shutil.rmtree(self._live)
        shutil.copytree(self._sound, self._live)

    def edit_manifest(self, change: Change) -> None:
        edit_json(self.step / MANIFEST, change)

    def edit_document(self, change: Change) -> None:
        """Changes the document, and has the plan name what is left of it."""

        def edited(raw: Any) -> None:
            change(raw)
            text = json.dumps(raw["document"])
            for members in raw["stacks"].values():
                members[:] = [name for name in members if json.dumps(name) in text]
            raw["stacks"] = {stored: names for stored, names in raw["stacks"].items() if names}

        self.edit_manifest(edited)

    def edit_array(self, name: str, change: Change) -> None:
        """Changes the metadata that TensorStore believes of one array."""
        store = stored_arrays(self.step)
        metadata = json.loads(store[f"{name}/.zarray"])
        change(metadata)
        store[f"{name}/.zarray"] = json.dumps(metadata)

    def read(self) -> None:
        """Opens step 2 and reads all of it onto the host, as tools do."""
        step = StoredStep(RunDirectory(self.run, read_only=True).candidates(DAMAGED)[-1])
        step.read(step.leaves)

    def reader_refuses(self, match: str) -> CheckpointError:
        """Asserts that step 2 cannot be read, for this reason."""
        return self._refused(self.read, match, CorruptCheckpointError)

    def refuses(
        self, match: str, kind: type[CheckpointError] = CorruptCheckpointError
    ) -> CheckpointError:
        """Asserts that no program restores step 2, for this reason, and nothing live changes."""
        before = self.program.state()
        error = self._refused(lambda: self.ckpt.restore(DAMAGED), match, kind)
        assert_trees_identical(self.program.state(), before)
        return error

    def _refused(
        self, read: Callable[[], object], match: str, kind: type[CheckpointError]
    ) -> CheckpointError:
        with pytest.raises(kind, match=match) as caught:
            read()
        error = caught.value
        assert (error.step, f"step {DAMAGED}" in str(error)) == (DAMAGED, True)
        assert error.path is not None
        assert error.path.startswith(str(self.step))
        return error


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    hostile = Hostile(tmp_path_factory.mktemp("hostile"))
    yield hostile
    hostile.ckpt.close()


@pytest.fixture
def hostile(shared: Hostile) -> Hostile:
    """The shared run, without the damage of the test before."""
    shared.repair()
    return shared


@pytest.fixture
def run(hostile: Hostile) -> Path:
    """Its directory, for tests with checkpointers of their own."""
    return hostile.run


def stored_arrays(step: Path) -> Any:
    base = {"driver": "file", "path": f"{step / 'state'}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


# --- files that are not what a save writes -------------------------------------------------------

MANIFEST, SUMMARY, RECORD = "manifest/data.json", "summary/data.json", "_CHECKPOINT_METADATA"
Damage = Callable[[Path], None]


def with_bytes(change: Callable[[bytes], bytes] | bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return damage


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    outside = path.rename(path.parents[2] / "outside")
    path.symlink_to(outside)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)  # holes: it takes no room here


def unsealed(damage: Damage) -> Damage:
    """Takes the digests from the mark too, as whoever changes the record on purpose can."""

    def both(path: Path) -> None:
        damage(path)
        (path.parent / MARK).write_text("committed")

    return both


def recorded(**changes: Any) -> Damage:
    return unsealed(lambda path: edit_json(path, lambda raw: raw.update(changes)))


def at_time(nsecs: Any) -> Damage:
    return recorded(commit_timestamp_nsecs=nsecs)


@pytest.mark.parametrize(
    ("file", "damage", "match"),
    [
        (MANIFEST, with_bytes(b""), "manifest"),
        (MANIFEST, with_bytes(lambda raw: raw[: len(raw) // 2]), "manifest"),
        (MANIFEST, with_bytes(lambda raw: bytes(len(raw))), "manifest"),
        (MANIFEST, with_bytes(b"[" * 100_000), "manifest"),
        (MANIFEST, with_bytes(b"null"), "manifest"),
        (MANIFEST, with_bytes(lambda raw: raw.replace(b"0.01", b"0.02")), "manifest.* damaged"),
        (MANIFEST, a_pipe, "special file"),
        (MANIFEST, a_link, "symbolic link"),
        (MANIFEST, huge, "at most .* bytes, found 1099511627776"),
        (MANIFEST, gone, "cannot read its manifest"),
        ("manifest", gone, "cannot read its manifest"),
        ("state", a_link, "symbolic link"),
        ("state/manifest.ocdbt", a_link, "symbolic link"),
        (SUMMARY, with_bytes(b""), "summary"),
        (SUMMARY, with_bytes(b"5"), "summary"),
        (SUMMARY, with_bytes(lambda raw: raw.replace(b"0.5", b"0.7")), "summary.* damaged"),
        (SUMMARY, a_link, "symbolic link"),
        ("summary", gone, "cannot read its summary"),
        (RECORD, unsealed(with_bytes(b"")), "_CHECKPOINT_METADATA: was damaged"),
        (RECORD, unsealed(with_bytes(b"[" * 100_000)), "_CHECKPOINT_METADATA: was damaged"),
        (RECORD, unsealed(with_bytes(b"[]")), "_CHECKPOINT_METADATA: was damaged"),
        (RECORD, a_pipe, "_CHECKPOINT_METADATA: .*found a special file"),
        (RECORD, huge, "_CHECKPOINT_METADATA: expected at most .* found 1099511627776"),
        (RECORD, gone, "cannot read its commit record.*_CHECKPOINT_METADATA"),
        (RECORD, at_time(10**30), "expected the time of the step's commit"),
        (RECORD, at_time(-1), "expected the time of the step's commit"),
        (RECORD, at_time("now"), "expected the time of the step's commit"),
        (RECORD, at_time(True), "expected the time of the step's commit"),
        (MARK, with_bytes(b"committed\n{"), r"commit_success\.txt: was damaged"),
        (MARK, with_bytes(b"committed\n" + b"[" * 100_000), r"commit_success\.txt: was damaged"),
        (MARK, with_bytes(b'committed\n{"a": 1} x'), r"commit_success\.txt: was damaged"),
        (MARK, a_pipe, r"commit_success\.txt: .*found a special file"),
    ],
)
def test_a_file_that_no_save_writes_is_refused(
    hostile: Hostile, file: str, damage: Damage, match: str
) -> None:
    damage(hostile.step / file)
    hostile.reader_refuses(match)  # as damage, and not as a step of bare Orbax
    directory = RunDirectory(hostile.run, read_only=True)
    assert [step.step for step in directory.steps()] == [1, DAMAGED]
    if file.startswith("summary"):
        assert directory.metrics(directory.candidates(DAMAGED)[-1]) == {}


@pytest.mark.parametrize("names", [("manifest", "summary"), (RECORD, MARK)])
def test_json_that_is_lost_together_is_damage(hostile: Hostile, names: tuple[str, str]) -> None:
    for name in names:
        gone(hostile.step / name)
    hostile.reader_refuses(f"cannot read its ({names[0]}|summary|commit record)")


def test_a_commit_record_that_is_not_what_was_sealed_is_damaged(hostile: Hostile) -> None:
    edit_json(
        hostile.step / RECORD,
        lambda raw: raw.update(commit_timestamp_nsecs=raw["commit_timestamp_nsecs"] ^ 1),
    )
    hostile.reader_refuses(r"_CHECKPOINT_METADATA: was damaged: .*commit_success\.txt")


# --- the manifest's leaves and plan --------------------------------------------------------------


def leaf(raw: Any, name: str) -> Any:
    """The array node of this name."""
    found: list[Any] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict) and node.get("array") == name:
            found.append(node)
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, (dict, list)):
                walk(child)

    walk(raw["document"])
    return found[0]


WEIGHT, TABLE = "model/0.weight", "stateful/box/table"


def leaf_with(**changes: Any) -> Change:
    return lambda raw: leaf(raw, WEIGHT).update(changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (leaf_with(kind="torch", dtype="int4"), "leaf that can be rebuilt"),
        (leaf_with(kind="torchax", dtype="float8_e8m0fnu"), "leaf that can be rebuilt"),
        (leaf_with(kind="key", dtype="uint32", shape=[2], impl="zebra"), "that can be rebuilt"),
        (leaf_with(kind="key", dtype="uint32", shape=[2**30], impl="rbg"), "words wide"),
        (leaf_with(array="../../../../etc/passwd"), "no such array"),
    ],
)
def test_a_leaf_that_cannot_come_back_is_refused(
    hostile: Hostile, change: Change, match: str
) -> None:
    hostile.edit_manifest(change)
    hostile.refuses(match)


def test_a_state_as_deep_as_can_be_saved_comes_back(directory: Path) -> None:
    state: Any = 1
    for level in range(MAX_DEPTH - 4):
        state = [state, (1,)] if level % 2 else {(1, 2): state}
    save(directory, mlp(), stateful={"it": Box(state)})
    box = Box()
    assert resume(directory, mlp(), stateful={"it": box}) == 1
    assert_trees_identical(box.state, state)


# --- what components take ------------------------------------------------------------------------


def inside(raw: Any, *names: str) -> Any:
    """The node within nested dicts of the document."""
    node = raw["document"][names[0]]
    for name in names[1:]:
        node = dict(node["dict"])[name]
    return node


def component(name: str, change: Change, *within: str) -> Change:
    return lambda raw: change(inside(raw, name, *within))


def replaced(*names: str, by: Any) -> Change:
    def change(node: Any) -> None:
        for pair in node["dict"]:
            if pair[0] == names[-1]:
                pair[1] = by

    return component(names[0], change, *names[1:-1])


def too_deep(part: str) -> Change:
    node: Any = 1
    for _ in range(MAX_DEPTH + 20):
        node = [node]
    return lambda raw: raw["document"].update({part: node})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (component("model", lambda n: n.update(dict=5)), "model: malformed"),
        (component("model", lambda n: n["dict"][0].__setitem__(1, 5)), "expected a leaf"),
        (component("model", lambda n: n["dict"].append(["0.weight", 5])), "one node for each key"),
        (component("model", lambda n: n.update(ties=[["a"]])), "a key and a node"),
        (component("model", lambda n: n.update(ties=[["a", 5]])), "a list of names"),
        (component("model", lambda n: n.update(extra_state=[["", {"zebra": 1}]])), "unknown node"),
        (component("optimizer", lambda n: n.update({"class": 5})), "a list of names"),
        (component("optimizer", lambda n: n["dict"].pop()), "param_groups"),
        (component("optimizer", lambda n: n["dict"].pop(0)), "optimizer/state"),
        (component("optimizer", lambda n: n.append(5), "param_groups"), "param_groups/1"),
        (component("optimizer", lambda n: n.append({"dict": []}), "param_groups"), "params"),
        (component("optimizer", lambda n: n.append(n[0]), "param_groups"), "one group"),
        (
            component("optimizer", lambda n: n["dict"][0].__setitem__(1, 5), "state"),
            "a list of nodes",
        ),
        (component("stateful", lambda n: n.update(dict=[["box", 1], ["box", 2]])), "for each key"),
        (component("stateful", lambda n: n.update(dict={"box": 5})), "stateful: malformed"),
        (component("rng", lambda n: n["dict"].pop()), "rng: expected the states"),
        (replaced("rng", "torch", by="text"), "rng/torch: expected random state"),
        (replaced("rng", "numpy", by=None), "rng/numpy: expected random state"),
        (replaced("rng", "python", by={"tuple": [3, {"tuple": [1, 2]}, None]}), "rng/python"),
        (replaced("rng", "torchax", by=5), "rng/torchax: expected random state"),
        (replaced("rng", "numpy", "state", "pos", by=10**6), "position 1000000 of 624 words"),
        (replaced("rng", "numpy", "state", "pos", by=-1), "position -1 of 624 words"),
        (replaced("stateful", "box", by={"zebra": 1}), "unknown node"),
        *((too_deep(part), "nests deeper") for part in ("model", "optimizer", "stateful", "rng")),
    ],
)
def test_a_document_of_no_component_is_refused(
    hostile: Hostile, change: Change, match: str
) -> None:
    hostile.edit_document(change)
    hostile.refuses(match)


@pytest.mark.parametrize("state", [5, None, [["last_epoch", 3], ["gamma"]], {"tuple": [1]}])
def test_a_state_that_an_object_refuses_is_a_mismatch_and_undone(
    hostile: Hostile, state: Any
) -> None:
    hostile.edit_manifest(lambda raw: raw["document"].update(lr_scheduler=state))
    error = hostile.refuses("lr_scheduler: refused the stored state", MismatchError)
    assert error.__cause__ is not None


def test_what_jax_would_narrow_is_not_restored_narrowed(hostile: Hostile) -> None:
    hostile.edit_manifest(lambda raw: leaf(raw, TABLE).update(kind="jax"))
    with pytest.raises(UnsupportedLeafError, match=f"{TABLE}.*would convert"):
        hostile.ckpt.restore(DAMAGED)


# --- arrays that are not as the manifest says ----------------------------------------------------


def compressed_by(codec: Codec, **changes: Any) -> Change:
    return lambda metadata: metadata.update(
        compressor={**array_writer.zarr_compressor(codec, ()), **changes}
    )


@pytest.mark.parametrize("name", ["rng.torch", "model.0.weight"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(shape=[2**60]), "found .*1152921504606846976"),
        (lambda m: m.update(dtype="|O"), "'|O'"),
        (lambda m: m.update(dtype={"a": 1}), "expected"),
        (lambda m: m.update(chunks=[0]), "chunks within"),
        (lambda m: m.update(compressor={"id": "bz2"}), "Zstandard"),
        (lambda m: m.update(compressor="zstd"), "metadata of a Zarr array"),
        (lambda m: m.update(filters=[{"id": "delta"}]), "no filters"),
        (lambda m: m.pop("shape"), "metadata of a Zarr array"),
    ],
)
def test_array_metadata_that_contradicts_the_manifest_is_refused_before_memory_is_taken(
    hostile: Hostile, name: str, change: Change, match: str
) -> None:
    hostile.edit_array(name, change)
    refuses = hostile.refuses if name.startswith("model") else hostile.reader_refuses
    assert refuses(match).key_path == name.replace(".", "/", 1)


@pytest.mark.parametrize("setting", [{"cname": "lzma"}, {"clevel": "9"}, {"shuffle": 5}])
def test_settings_that_blosc_does_not_have_are_refused(
    hostile: Hostile, setting: dict[str, Any]
) -> None:
    hostile.edit_array("rng.torch", compressed_by("blosc-lz4", **setting))
    hostile.reader_refuses(f"rng/torch: .*{next(iter(setting))}")


IMPOSSIBLE = "this host can hold.*which is impossible: only .* bytes are on storage"


@pytest.mark.parametrize(
    ("size", "chunk", "compress", "match"),
    [
        *((2**50, 2**50, compressed_by(codec), IMPOSSIBLE) for codec in get_args(Codec)),
        (2**50, 2**50, lambda m: m.update(compressor=None), IMPOSSIBLE),
        (2**30, 1, lambda m: None, "chunks, found 1073741824"),
    ],
)
def test_a_claim_beyond_the_hosts_memory_is_refused_even_if_all_agrees(
    hostile: Hostile, size: int, chunk: int, compress: Change, match: str
) -> None:
    def resize(metadata: Any) -> None:
        metadata.update(shape=[size], chunks=[chunk])
        compress(metadata)

    hostile.edit_manifest(lambda raw: leaf(raw, TABLE).update(shape=[size]))
    hostile.edit_array("stateful.box/table", resize)
    assert hostile.refuses(match).key_path == TABLE


def test_holes_in_array_data_are_not_taken_for_a_host_that_is_too_small(
    hostile: Hostile,
) -> None:
    os.truncate(next(hostile.step.rglob("d/*")), 2 * host_memory.host_memory_bytes())
    hostile.reader_refuses("a file that this host can hold.*which is impossible")


@pytest.mark.parametrize("codec", [False, "blosc-lz4"])
def test_a_host_that_is_too_small_is_said_and_no_step_is_called_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, codec: bool | Codec
) -> None:
    options = CheckpointOptions(compression=codec)
    keep = policies.PreserveAll()
    table = np.zeros(50_000) if codec else np.arange(50_000.0)
    with TorchaxCheckpointer(directory, options=options, preservation_policy=keep) as ckpt:
        ckpt.attach(stateful={"box": Box({"table": table})})
        for step in (1, DAMAGED):
            ckpt.save(step, force=True)
        ckpt.wait_until_finished()
        assert ckpt.verify() == DAMAGED
        committed = ckpt._directory.candidates(DAMAGED)[-1]
        leaves = StoredStep(committed, options).leaves
        before = sorted(directory.rglob("*"))
        monkeypatch.setattr(host_memory, "host_memory_bytes", lambda: 300_000)
        said = r"step 2 .*can hold, 300000 bytes, found 4\d{5} bytes.*more memory"
        assert committed in ckpt._directory.verified
        for read in (  # any step; a warning that one is skipped would fail
            ckpt.restore,
            ckpt.load,
            lambda: resume(directory, stateful={"box": Box()}),
            lambda: StoredStep(committed, options).read(leaves),
        ):
            with pytest.raises(OutOfMemoryError, match=said):
                read()
        monkeypatch.undo()
        assert sorted(directory.rglob("*")) == before
        assert ckpt.restore().step == DAMAGED


UNREAD = ("_METADATA", "ocdbt.process_0/manifest.ocdbt")
"""What the library's reader leaves to others, and what was merged when the step was saved."""


@pytest.mark.parametrize("files", [["manifest.ocdbt"], ["d/*"], UNREAD])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone"])
def test_damaged_storage_metadata_is_refused_or_unused(
    hostile: Hostile, files: Sequence[str], damage: str
) -> None:
    for path in [path for file in files for path in (hostile.step / "state").glob(file)]:
        raw = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(raw[: len(raw) // 2] if damage == "truncated" else b"\x5a" * len(raw))
    if files is UNREAD:
        hostile.read()
    else:
        hostile.reader_refuses(f"step {DAMAGED}")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda hostile: gone(hostile.step / SUMMARY), "cannot read its summary"),
        (lambda hostile: (hostile.step / RECORD).write_text("5"), "_CHECKPOINT_METADATA: was"),
        (lambda hostile: hostile.edit_manifest(leaf_with(array="model/0.bias")), "found two"),
        (lambda hostile: hostile.edit_document(replaced("rng", "numpy", by=None)), "rng/numpy"),
        (lambda hostile: hostile.edit_array("rng.torch", lambda m: m.pop("shape")), "rng/torch"),
    ],
)
def test_a_program_that_attaches_resumes_from_the_step_before(
    hostile: Hostile, damage: Callable[[Hostile], object], match: str
) -> None:
    damage(hostile)
    hostile.refuses(match)
    with TorchaxCheckpointer(hostile.run) as ckpt:
        assert ckpt.metrics(DAMAGED) == ({} if "summary" in match else {"loss": 0.5})
        with pytest.warns(UserWarning, match=match):
            assert Program().attach(ckpt) == 1


# --- compressed chunks ---------------------------------------------------------------------------

CHUNK = 1 << 14


@pytest.fixture(scope="module", params=[codec for codec in get_args(Codec) if codec != "zstd"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with one array, of one chunk, half of it zeros, compressed by Blosc."""
    path = tmp_path_factory.mktemp("packed")
    table = np.random.default_rng(0).standard_normal(CHUNK, dtype=np.float32)
    table[CHUNK // 2 :] = 0
    options = CheckpointOptions(compression=request.param)
    return save_states(path, {1: {"w": table}}, options=options)


@contextlib.contextmanager
def chunk_replaced(run: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """Has TensorStore find other bytes in the place of the compressed chunk, for a time."""
    state = run / "1" / "state"
    kept = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    store = stored_arrays(run / "1")
    store["state.w/0"] = change(store["state.w/0"])
    yield
    for path in state.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)


def header(**fields: int) -> Callable[[bytes], bytes]:
    """Changes numbers at the beginning of a chunk of Blosc."""
    # First byte and number of bytes.
    places = {"version": (0, 1), "codec_version": (1, 1), "flags": (2, 1), "typesize": (3, 1)}
    places |= {"nbytes": (4, 4), "blocksize": (8, 4), "cbytes": (12, 4)}

    def change(raw: bytes) -> bytes:
        edited = bytearray(raw)
        for name, value in fields.items():
            first, size = places[name]
            edited[first : first + size] = value.to_bytes(size, "little")
        return bytes(edited)

    return change


def of_another_size(count: int) -> Callable[[bytes], bytes]:
    """Changes a chunk to a sound one of ``count`` zeros."""

    def change(raw: bytes) -> bytes:
        compressor = array_writer.zarr_compressor("blosc-lz4", ())
        metadata = {"shape": [count], "chunks": [count], "dtype": "<f4", "compressor": compressor}
        spec: dict[str, Any] = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
        spec["store_data_equal_to_fill_value"] = True
        store: Any = ts.open(spec, create=True, context=ts.Context()).result()
        store.write(np.zeros(count, np.float32)).result()
        return bytes(store.kvstore["0"])

    return change


MAX = 2**32 - 1
LIES: dict[str, Callable[[bytes], bytes]] = {
    **{f"nbytes {n}": header(nbytes=n) for n in (0, 1, CHUNK * 2, 2**31 - 17, 2**31 - 1, MAX)},
    **{f"blocksize {n}": header(blocksize=n) for n in (0, 1, 3, CHUNK * 8, 2**31 - 1, MAX)},
    **{f"cbytes {n}": header(cbytes=n) for n in (0, 15, 16, 2**31 - 1, MAX)},
    "thirds": header(nbytes=2**31 - 17, blocksize=(2**31 - 17) // 3),
    "large": header(nbytes=2**30, blocksize=2**30),
    "all flags": header(flags=0xFF),
    "not compressed": header(flags=2),
    "not compressed, large": header(flags=2, nbytes=2**31 - 17),
    "typesize": header(typesize=0),
    "version": header(version=9),
    "codec_version": header(codec_version=9),
    "nothing": lambda raw: b"",
    "half a header": lambda raw: raw[:15],
    "a header alone": lambda raw: raw[:16],
    "half": lambda raw: header(cbytes=len(raw) // 2)(raw[: len(raw) // 2]),
    "garbage": lambda raw: raw[:16] + b"\xff" * (len(raw) - 16),
    "shorter": of_another_size(CHUNK - 1),
    "longer": of_another_size(16 << 20),
}


def test_a_chunk_of_blosc_that_lies_is_refused_by_name(packed: Path) -> None:
    """And one with flipped bits, of which most are in the header and the offsets."""
    draw = np.random.default_rng(1)

    def flipped(raw: bytes) -> bytes:
        edited = bytearray(raw)
        for _ in range(draw.integers(1, 4)):
            edited[draw.integers(draw.choice([16, 64, len(raw)]))] ^= 1 << draw.integers(8)
        return bytes(edited)

    num_refused = 0
    with TorchaxCheckpointer(packed) as ckpt:
        intact = ckpt.load(1)["w"].tobytes()
        for lie, change in LIES.items():
            with chunk_replaced(packed, change):
                with pytest.raises(CorruptCheckpointError, match="state/w") as caught:
                    pytest.fail(f"{lie}: {ckpt.load(1)}")
                assert caught.value.key_path == "state/w", lie
        for _ in range(40):
            with chunk_replaced(packed, flipped):
                try:
                    assert ckpt.load(1)["w"].tobytes() == intact
                except CorruptCheckpointError:
                    num_refused += 1
        assert num_refused > 20
        assert ckpt.load(1)["w"].tobytes() == intact


@pytest.mark.parametrize(("gib", "threads"), [(1, 1), (4, 1), (8, 2), (1 << 20, os.cpu_count())])
def test_as_many_chunks_are_unpacked_at_once_as_the_host_has_memory_for(
    gib: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since a chunk can unpack to 2 GiB, whatever its array says."""
    monkeypatch.setattr(host_memory, "host_memory_bytes", lambda: gib << 30)
    found = tensorstore_context.reading_context()["data_copy_concurrency"].to_json()
    assert found == {"limit": min(threads, os.cpu_count() or 1)}


# --- commit records, summaries, names of steps ---------------------------------------------------


def test_what_no_save_has_named_and_written_is_no_step(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = run / str(DAMAGED)
    outside = shutil.copytree(step, run.parent / "outside")
    for name in ("3", "incoming-2"):
        (run / name).symlink_to(outside)
    for name in ("02", "-2", "2 ", "٣", "9" * 200, "incoming-٣", "1e3"):
        shutil.copytree(step, run / name)
    of_a_user = run / "7"
    (of_a_user / "manifest").mkdir(parents=True)
    for file in ("README.md", "manifest/a.yaml"):
        (of_a_user / file).touch()
    (run / "8").mkdir()
    with TorchaxCheckpointer(run) as ckpt:
        assert ckpt.all_steps() == [1, DAMAGED]
        assert Program().attach(ckpt) == DAMAGED
        for number in (3, 7, 8):
            with pytest.raises(StepNotFoundError):
                ckpt.restore(number)
    assert caplog.text.count("looks like a step, but is a symbolic link") == 2


def test_code_named_in_a_commit_record_is_not_imported(run: Path) -> None:
    handlers = dict.fromkeys(("state", "manifest", "summary"), "antigravity.Handler")
    recorded(item_handlers=handlers)(run / str(DAMAGED) / RECORD)
    with TorchaxCheckpointer(run) as ckpt:
        assert Program().attach(ckpt) == DAMAGED  # the names decide nothing
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "summaries",
    [
        ({"metrics": [["loss", 1]], "abandons": [[1]]}, {"abandons": {"1": 2}}),
        (
            {"metrics": {"loss": 10**400}},
            {"abandons": [["1", 2], [1, "x"], [None, None], [1, 2, 3], 5]},
        ),
    ],
    ids=str,
)
def test_a_hostile_summary_hides_no_step_and_breaks_no_policy(run: Path, summaries: Any) -> None:
    for step, summary in zip((1, DAMAGED), summaries, strict=True):
        (run / str(step) / SUMMARY).write_text(json.dumps(seals.seal(summary)))
    best = policies.AnyPreservationPolicy([policies.BestN(metric="loss"), policies.LatestN(5)])
    program = Program()
    with TorchaxCheckpointer(run, preservation_policy=best) as ckpt:
        assert program.attach(ckpt) == DAMAGED
        assert ckpt.all_steps() == [1, DAMAGED]
        assert all(isinstance(ckpt.metrics(step), dict) for step in (1, DAMAGED))
        ckpt.best_step()
        assert ckpt.save(3, force=True, metrics={"loss": 1.0})


# --- functional state and steps of bare Orbax ----------------------------------------------------


def test_hostile_functional_state_is_refused(directory: Path) -> None:
    state = {"w": jnp.ones((2, 3)), "n": [1, 2.5]}
    save_states(directory, {1: state, DAMAGED: state})
    manifest = directory / str(DAMAGED) / MANIFEST
    sound = manifest.read_bytes()
    changes: tuple[Change, ...] = (
        lambda raw: raw["document"].update(state={"dict": [[{"array": "x"}, 5]]}),
        lambda raw: raw["document"].update(state={"tuple": 5}),
        lambda raw: raw["document"].update(state={}),
        component("state", lambda n: n["dict"].append([{"zebra": 1}, 5])),
        component("state", lambda n: n.update(shape=[3, 2]), "w"),
        component("state", lambda n: n.update(shape=[2**40]), "w"),
    )
    abstract = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "n": [1, 2.5]}
    for change, wanted in itertools.product(changes, (None, abstract)):
        manifest.write_bytes(sound)
        edit_json(manifest, change)
        with TorchaxCheckpointer(directory) as ckpt:
            with pytest.raises((CorruptCheckpointError, MismatchError)) as caught:
                ckpt.load(DAMAGED, wanted)
            assert caught.value.step == DAMAGED
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if isinstance(caught.value, CorruptCheckpointError):
                    assert_trees_identical(ckpt.load()["n"], [1, 2.5])


def test_a_step_of_bare_orbax_reads_nothing_outside_of_it(directory: Path) -> None:
    ocp.save(directory / "1", {"a": np.arange(3)})
    for name in ("../../../secret", "/secret"):

        def change(raw: Any, name: str = name) -> None:
            (entry,) = raw["tree_metadata"].values()
            entry["key_metadata"][0]["key"] = name
            raw["use_ocdbt"] = False

        edit_json(directory / "1" / "state" / "_METADATA", change)
        with TorchaxCheckpointer(directory) as ckpt:
            for wanted in (None, {"a": np.zeros(3, np.int64)}):
                with pytest.raises(CorruptCheckpointError, match="arrays within the step"):
                    ckpt.load(1, wanted)


def test_why_a_step_of_bare_orbax_cannot_be_read_is_said(directory: Path) -> None:
    ocp.save(directory / "1", {"a": np.arange(3)})
    edit_json(directory / "1" / "state" / "_METADATA", lambda raw: raw.update(use_zarr3=False))
    with (
        TorchaxCheckpointer(directory) as ckpt,
        pytest.raises(CorruptCheckpointError, match='its metadata: .*opening "zarr" driver'),
    ):
        ckpt.load(1)


def test_a_step_of_bare_orbax_beyond_the_hosts_memory_is_refused_and_a_state_on_devices_is_not(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ocp.save(directory / "1", {"a": np.arange(30_000)})
    state = {name: jax.device_put(np.ones(10_000, np.float32)) for name in "abcdefgh"}
    options = CheckpointOptions(compression=True)  # for small files
    with TorchaxCheckpointer(tmp_path / "on devices", options=options) as ckpt:
        ckpt.save(1, state=state, force=True)
        ckpt.wait_until_finished()
        monkeypatch.setattr(host_memory, "host_memory_bytes", lambda: 60_000)
        assert ckpt.load(1, state).keys() == state.keys()
    said = "this host can hold, 60000 bytes, found 240000"
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(OutOfMemoryError, match=said):
        ckpt.load(1)


# --- modes ---------------------------------------------------------------------------------------


def test_a_save_writes_and_removes_through_no_link(directory: Path, tmp_path: Path) -> None:
    probes = (".torchax_ckpt_write_test", permissions.PROBE)
    leftovers = [directory / "1.orbax-checkpoint-tmp", directory / "deleting-3"]
    kept = tmp_path / "of-the-user"
    kept.mkdir()
    directory.mkdir()
    for name in (*probes, "file"):
        (kept / name).write_text("precious")
    for name in probes:
        (directory / name).symlink_to(kept / name)
    for link in leftovers:
        link.symlink_to(kept)
    # Left by a program that was killed while it probed.
    leftovers.append(directory / f"{permissions.PROBE}-{'01' * 16}{permissions.DRAFT_SUFFIX}")
    leftovers[-1].touch()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)}, force=True)
    assert ckpt.all_steps() == [1]
    assert not any(path.is_symlink() or path.exists() for path in leftovers)
    assert {path.read_text() for path in kept.iterdir()} == {"precious"}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_nothing_created_is_world_writable_at_any_moment(directory: Path, umask: int) -> None:
    """A thread looks for what another user could reach and write while steps are saved."""
    target, seen, done = directory / "deep" / "er", set[str](), threading.Event()

    def mode_of(folder: str, name: str) -> int:
        try:
            return os.lstat(os.path.join(folder, name)).st_mode
        except FileNotFoundError:
            return 0

    def watch() -> None:
        while not done.is_set():
            for folder, folders, files in os.walk(target):
                folders[:] = [f for f in folders if mode_of(folder, f) & 0o001]
                found = [n for n in (*folders, *files) if mode_of(folder, n) & 0o002]
                seen.update(os.path.join(folder, name) for name in found)

    watcher, before = threading.Thread(target=watch), os.umask(umask)
    watcher.start()
    try:
        with TorchaxCheckpointer(target, preservation_policy=policies.PreserveAll()) as ckpt:
            ckpt.attach(mlp())
            for step in range(1, 6):
                ckpt.save(step, force=True)
            ckpt.wait_until_finished()
            ckpt.restore(2)
            ckpt.save(3, force=True)
    finally:
        done.set()
        watcher.join()
        os.umask(before)
    assert not seen
    expected = {True: 0o777 & ~umask & ~0o002, False: 0o666 & ~umask & ~0o002}
    paths = [directory, *directory.rglob("*")]
    assert target / FOLDER in paths  # the events are written, too
    for path in paths:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == expected[path.is_dir()], f"{path}: {mode:o}"
    assert not list(target.glob("*.draft"))
    assert resume(target, mlp()) == 3


def test_a_pointer_of_git_lfs_in_a_step_is_named_as_such(directory: Path) -> None:
    save_states(directory, {1: {"w": np.arange(1000)}})
    sound = shutil.copytree(directory, directory.with_name("sound"))
    for part in (MANIFEST, SUMMARY, RECORD, "manifest.ocdbt", "d/"):
        files = [p for p in (directory / "1").rglob("*") if p.is_file() and part in str(p)]
        for file in files:
            file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        said = "a pointer of Git LFS.*git lfs pull"
        with (
            TorchaxCheckpointer(directory) as ckpt,
            pytest.raises(CorruptCheckpointError, match=said) as caught,
        ):
            ckpt.load()
        assert Path(caught.value.file or "") in files
        shutil.rmtree(directory)
        shutil.copytree(sound, directory)
