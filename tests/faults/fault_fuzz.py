"""Feeds the readers of a checkpoint what nobody wrote, and looks at what comes out of them.

Inputs are mutations of a real step's JSON, of the other files of a run, and of files that weights
are imported from: nodes cut, doubled, swapped and replaced by others, by documents of the
manifest's own grammar and by extremes; and bytes flipped, cut and repeated. Each goes through a
reader as far as that reader goes, up to live objects. Whatever the input:

- nothing but a ``CheckpointError`` comes out, and it can be printed;
- it takes at most ``MAX_SECS``, and the process at most ``MAX_BYTES`` more than before;
- what is live after a failure is, to the bit, what it was before.

Input ``n`` of a seed is always the same, so a finding is seen again with ``--first n --count 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import random
import re
import resource
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import safetensors.numpy
import tensorstore as ts
import torch
import torchax
from etils import epath
from fuzz_damage import Form, damaged
from live import Live, command
from orbax.checkpoint import v1 as ocp
from support.waiting import T0, Clock

from torchax_ckpt import (
    CheckpointOptions,
    TorchaxCheckpointer,
    policies,
    torchax_backend,
    warm_start,
)
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError
from torchax_ckpt.formats.state_dict import save_dcp
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.state import pytree
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory import commit_record, step_files
from torchax_ckpt.storage.directory.assets import Assets
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lease import LEASE_SECS, Lease, LeaseHolder
from torchax_ckpt.storage.medium import seals

if TYPE_CHECKING:
    from torture import Torture

HARM, INPUTS = "inputs that did harm", "inputs"
FINDINGS = (HARM,)
MAX_SECS = 5.0
MAX_BYTES = 1 << 30
MANIFEST, SUMMARY = "manifest/data.json", "summary/data.json"
READ_ONLY = CheckpointOptions(read_only=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=1, help="number of the first input")


def torture(torture: Torture) -> None:
    """Feeds so many inputs, and ends the process at one that hangs."""
    torchax.enable_globally()
    readers = Readers(torture.scratch)
    if torture.given.weakened:
        WEAKENINGS[torture.given.weakened](readers)
    fuzz(torture, readers, hang_secs=20 * MAX_SECS)


def fuzz(torture: Torture, readers: Readers, hang_secs: float | None = None) -> None:
    """Feeds so many inputs, or as many as the time allows."""
    names = list(readers.by_name)
    weights = [readers.by_name[name].weight for name in names]
    readers.restore()
    before, peak, slowest_secs = readers.fingerprint(), _peak_bytes(), 0.0
    for number in torture.rounds(first=torture.given.first):
        source = random.Random(f"{torture.given.seed}/{number}")
        (name,) = source.choices(names, weights)
        fed = readers.by_name[name]
        raw = damaged(source, fed.raw, fed.form)
        if hang_secs is not None:
            faulthandler.dump_traceback_later(hang_secs, exit=True)
        began = time.monotonic()
        outcome, problem = _outcome(fed, raw)
        secs = time.monotonic() - began
        slowest_secs = max(slowest_secs, secs)
        if secs > MAX_SECS:
            problem += f"took {secs:.1f} s"
        if readers.fingerprint() != before:
            if outcome != "read":
                problem += f"{outcome}, and what is live has changed"
            readers.mend(before)
        torture.count(INPUTS, part=f"{name}: {outcome}")
        torture.find({HARM: [problem] * bool(problem)}, f"input {number} ({name})")
    faulthandler.cancel_dump_traceback_later()
    grown_bytes = _peak_bytes() - peak
    if grown_bytes > MAX_BYTES:
        torture.find({HARM: [f"peak memory grew by {grown_bytes >> 20} MiB"]})
    torture.count("peak memory, grown by MiB", grown_bytes >> 20)
    torture.count("milliseconds of the slowest input", round(1000 * slowest_secs))


def _outcome(fed: Fed, raw: bytes) -> tuple[str, str]:
    """What came out of a reader, and what of that it must not do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fed.read(raw)
    except CheckpointError as error:
        str(error).encode("utf-8", "backslashreplace")
        return type(error).__name__, ""
    except Exception as error:
        return f"!! {type(error).__name__}", traceback.format_exc(limit=-6)
    return "read", ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def reseal(document: Any) -> Any:
    """A document with a seal that fits if it can; else few would come further than the seal."""
    if isinstance(document, dict):
        document.pop("xxh3_64", None)
        return seals.seal(document)
    return document


def reseal_text(raw: bytes) -> bytes:
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        return json.dumps(reseal(json.loads(raw))).encode("utf-8", "surrogatepass")
    return raw


class Lines(Form):
    """A document on every line, as a list."""

    def load(self, raw: bytes) -> Any:
        return [json.loads(line) for line in raw.splitlines()]

    def dump(self, text: str, raw: bytes) -> bytes:
        # Between the documents of the list, wherever else that text may be: it is damage anyhow.
        return re.sub(rb"}, {", b"}\n{", super().dump(text, raw).strip(b"[]"))


class Header(Form):
    """What safetensors begin with: the length of a document, and it; tensors follow."""

    def load(self, raw: bytes) -> Any:
        return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])

    def dump(self, text: str, raw: bytes) -> bytes:
        header = super().dump(text, raw)
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        return len(header).to_bytes(8, "little") + header + data


class NoForm(Form):
    """No JSON at all."""

    def load(self, raw: bytes) -> Any:
        raise ValueError("bytes")


@dataclasses.dataclass(frozen=True)
class Fed:
    """What a reader is fed with: a real file, which is damaged, how often, and its form."""

    raw: bytes
    read: Callable[[bytes], None]
    weight: float
    form: Form = dataclasses.field(default_factory=Form)


@contextlib.contextmanager
def replaced(path: Path, raw: bytes) -> Iterator[None]:
    """A file with other content for a while."""
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(before)


class Readers:
    """The readers of runs, each fed with the bytes of one file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._run = folder, folder / "run"
        self._is_odd = False  # of the present input: decides between two ways to read it
        self._live = Live(3, 1, has_loader=False)
        step = self._run / "2"
        with TorchaxCheckpointer(self._run, preservation_policy=policies.PreserveAll()) as ckpt:
            self._live.attach_to(ckpt)
            for number in (1, 2):
                ckpt.save(number, force=True, metrics={"loss": 1.0})
                ckpt.wait_until_finished()
        mark = commit_record.sealing(epath.Path(step), "").strip().encode()
        for number in (1, 2):  # else few damaged files would come further than their seal
            (self._run / str(number) / commit_record.MARK).write_text("committed")
        self._open()
        (events,) = (self._run / "events").iterdir()
        base = {"driver": "file", "path": f"{step / 'state'}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        metadata = store.read("model.embed.weight/.zarray").result().value
        ocp.save((bare := folder / "bare") / "1", {"w": np.arange(3), "n": [3, "x", {}]})
        read_bare = TorchaxCheckpointer(bare, options=CheckpointOptions(read_only=True)).load
        holder = LeaseHolder("t1", "tpu-vm-7", 4711, "elsewhere", 9, T0 - 600, T0 - 9)
        assets = Assets.of({"model/config.json": "{}", "tokenizer/a.txt": "ä"}).content
        for name in ("leased", "1/assets"):
            (folder / name).mkdir(parents=True)
        self.by_name = {
            "restore": self._through(step / MANIFEST, self.restore, 0.40, reseal_text),
            "load": self._through(step / MANIFEST, self._load, 0.25, reseal_text),
            "summary": self._through(step / SUMMARY, self._list, 0.04),
            "commit record": self._through(step / commit_record.RECORD, self._list, 0.04),
            "mark": Fed(mark, self._mark, 0.04),
            "bare Orbax": self._through(bare / "1" / "state" / "_METADATA", read_bare, 0.04),
            "shardings": self._through(step / "state" / "_sharding", self._show, 0.04),
            "events": dataclasses.replace(self._through(events, self._report, 0.06), form=Lines()),
            "array metadata": Fed(metadata, self._array_metadata, 0.11),
            "lease": Fed(holder.to_bytes(), self._lease, 0.10),
            "assets": Fed(assets, self._assets, 0.06),
            **foreign(folder / "foreign"),
        }

    def _through(
        self,
        path: Path,
        call: Callable[[], Any],
        weight: float,
        change: Callable[[bytes], bytes] = lambda raw: raw,
    ) -> Fed:
        """A reader of a file of a run, which is tried with the real one."""

        def read(raw: bytes) -> None:
            self._is_odd = bool(len(raw) % 2)
            with replaced(path, change(raw)):
                call()

        read(path.read_bytes())
        return Fed(path.read_bytes(), read, weight)

    # --- a run ---

    def _open(self) -> None:
        keep = policies.BestN(metric="loss")
        self._ckpt = TorchaxCheckpointer(self._run, preservation_policy=keep, options=READ_ONLY)
        self._live.attach_to(self._ckpt, resume=False)

    def fingerprint(self) -> Any:
        """What is live."""
        return self._live.fingerprint()

    def mend(self, before: Any) -> None:
        """Has live objects hold the real step's state again; new ones where these cannot."""
        with contextlib.suppress(Exception):
            self.restore()
            if self.fingerprint() == before:
                return
        self._live = Live(3, 1, has_loader=False)
        self._open()
        self.restore()
        assert self.fingerprint() == before, "the real step restores the same state again"

    def restore(self) -> None:
        """Up to live objects."""
        self._ckpt.restore(2, strict=self._is_odd)

    def _load(self) -> None:
        """Up to loaded values, with the state that is wanted and without."""
        tensors = self._live.module.named_parameters()
        model = {n: jax.ShapeDtypeStruct(tuple(t.shape), "float32") for n, t in tensors}
        model["scale"] = jax.ShapeDtypeStruct((), "float32")
        for abstract in (None, {"model": model}):
            self._ckpt.load(2, abstract)

    def _list(self) -> None:
        """Up to the list of steps, and policies."""
        for step in self._ckpt.all_steps():
            self._ckpt.metrics(step)
        self._ckpt.best_step()

    def _mark(self, raw: bytes) -> None:
        """The digests in a commit mark."""
        with replaced(self._run / "2" / commit_record.MARK, b"committed\n" + raw):
            self._list()

    def _show(self) -> None:
        command("show", self._run, 2)

    def _report(self) -> None:
        """Up to what a report draws."""
        command("report", self._run, self._folder / "report.html")

    def _array_metadata(self, raw: bytes) -> None:
        """One array's metadata. What passes is of the shape and dtype asked for."""
        shape, dtype = (16, 8), "float32"
        if problem := array_checks._problem(raw, shape, dtype):
            raise CorruptCheckpointError(" ".join(problem))
        metadata = json.loads(raw)
        assert (tuple(metadata["shape"]), np.dtype(metadata["dtype"])) == (shape, dtype)

    def _lease(self, raw: bytes) -> None:
        """A lease, up to one that is held; it is never another's for longer than it may be."""
        clock, place = Clock(), self._folder / "leased"
        (place / "lease").write_bytes(raw)
        lease = Lease(place, clock=clock, sleep=clock.sleep)
        try:
            lease.hold()
            assert clock.waited_secs <= LEASE_SECS + 1
        finally:
            lease.release()
            (place / "lease").unlink(missing_ok=True)

    def _assets(self, raw: bytes) -> None:
        """What a model is; no name leads out of a folder."""
        seal = "0" * 16
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
            content = reseal(json.loads(raw))
            raw, seal = json.dumps(content).encode(), seals.seal_of(content)
        (self._folder / "1" / "assets" / "data.json").write_bytes(raw)
        step = CommittedStep(1, epath.Path(self._folder / "1"), 1)
        for name, text in step_files.read_assets(step, seal).items():
            assert isinstance(text, str)
            assert (self._folder / name).resolve().is_relative_to(self._folder.resolve())


def foreign(folder: Path) -> dict[str, Fed]:
    """Readers of other programs' files, up to a model that begins with their weights."""
    tensors: dict[str, np.ndarray] = {
        "a.w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(3),
    }
    model = torch.nn.Module()
    model.a = torch.nn.Module()
    model.a.w = torch.nn.Parameter(torch.zeros(3, 4, device="jax"))
    model.register_buffer("b", torch.zeros(3, dtype=torch.int64))
    (folder / "indexed").mkdir(parents=True)
    plain, index = folder / "w.safetensors", folder / "indexed" / "model.safetensors.index.json"
    for path in (plain, folder / "indexed" / "one.safetensors"):
        path.write_bytes(safetensors.numpy.save(tensors, {"c": "a.w"}))
    weights = dict.fromkeys(tensors, "one.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    with torchax_backend.native_torch():
        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        torch.save({**state, "tied": state["b"], "epoch": 3}, archive := folder / "w.pt")
        save_dcp(state, folder / "dcp")
    with zipfile.ZipFile(archive) as members:
        content = {name: members.read(name) for name in members.namelist()}
    (pickled,) = (name for name in content if name.endswith("/data.pkl"))
    (chunk,) = (folder / "dcp").glob("*.distcp")

    def through(path: Path, whole: Path) -> Callable[[bytes], None]:
        def read(raw: bytes) -> None:
            with replaced(path, raw):
                warm_start(model, whole, strict=False)

        return read

    def pickle(raw: bytes) -> None:
        """What an archive describes its tensors by, with nothing else of it damaged."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as members:
            for name, octets in {**content, pickled: raw}.items():
                members.writestr(name, octets)
        through(archive, archive)(made.getvalue())

    files: dict[str, tuple[Path, Path, float, Form]] = {
        "safetensors": (plain, plain, 0.12, Header()),
        "index": (index, index.parent, 0.10, Form()),
        "torch archive": (archive, archive, 0.10, NoForm()),
        "dcp metadata": (folder / "dcp/.metadata", folder / "dcp", 0.08, NoForm()),
        "dcp chunk": (chunk, folder / "dcp", 0.06, NoForm()),
    }
    for path, whole, *_ in files.values():
        through(path, whole)(path.read_bytes())
    return {"torch pickle": Fed(content[pickled], pickle, 0.12, NoForm())} | {
        name: Fed(path.read_bytes(), through(path, whole), weight, form)
        for name, (path, whole, weight, form) in files.items()
    }


# --- readers that are less careful ---------------------------------------------------------------


def _naive(readers: Readers) -> None:
    """Takes the nodes and stacks of a manifest at their word."""
    true = Manifest.from_json(json.loads(readers.by_name["restore"].raw), path="")

    def naive(document: Any, **how: Any) -> Manifest:
        stacks = {stored: tuple(members) for stored, members in document["stacks"].items()}
        plan = Plan(stacks, frozenset(document["empty"]))
        return dataclasses.replace(true, document=document["document"], plan=plan)

    Manifest.from_json = naive  # type: ignore[method-assign,assignment]
    pytree.check_document = lambda *args: None
    readers.by_name = {name: readers.by_name[name] for name in ("restore", "load")}


def _trusting(readers: Readers) -> None:
    """Takes a lease at its word."""

    def trust(raw: bytes) -> None:
        LeaseHolder(**json.loads(raw)).describe(0.0)

    readers.by_name = {"lease": dataclasses.replace(readers.by_name["lease"], read=trust)}


def _half(readers: Readers) -> None:
    """Changes what is live, and then fails."""
    restore = readers.by_name["restore"]

    def half(raw: bytes) -> None:
        readers._live.box.state["seen"] += 1
        restore.read(raw)

    readers.by_name = {"restore": dataclasses.replace(restore, read=half)}


WEAKENINGS = {"naive": _naive, "trusting": _trusting, "half": _half}
