"""Readers of the small files of a run, and of other programs' files, for ``fuzz.py``.

Each takes the bytes of one file that anybody may have written: the lease, the name of the run, the
events, what Orbax notes beside the arrays, and the files that weights are imported from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from etils import epath

from torchax_ckpt import torchax_backend
from torchax_ckpt.formats.opening import open_files
from torchax_ckpt.formats.state_dict import save_dcp
from torchax_ckpt.formats.tensor_files import TensorFiles
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory import run_identity, step_files
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lease import LEASE_SECS, Lease
from torchax_ckpt.storage.directory.lease_holder import LeaseHolder
from torchax_ckpt.storage.directory.run_identity import RunName
from torchax_ckpt.storage.directory.summaries import Summaries
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.storage.medium.assets import Assets
from torchax_ckpt.stored.stored_step import StoredStep
from torchax_ckpt.telemetry import journal, timeline
from torchax_ckpt.telemetry.events import Event

# What is read of one file's tensors; a reader of more asks its user, or takes disk for it.
_MAX_READ_BYTES = 1 << 24
_HEX = "0123456789abcdef" * 2
_EVENTS_FILE = "1732201234123456789-5f0c2a9e.jsonl"


# --- forms: how the JSON in a file is found, and put back -----------------------------------------


class Form:
    """A file that is one JSON document."""

    def load(self, raw: bytes) -> Any:
        """The document; raises ValueError where there is none."""
        return json.loads(raw)

    def dump(self, texts: str, raw: bytes) -> bytes:
        """The file of the real one's form that holds this text of a document."""
        return texts.encode("utf-8", "surrogatepass")


class Lines(Form):
    """A document on every line, as a list."""

    def load(self, raw: bytes) -> Any:
        return [json.loads(line) for line in raw.splitlines()]

    def dump(self, texts: str, raw: bytes) -> bytes:
        # Between the documents of the list, wherever else that text may be: it is damage anyhow.
        return re.sub(rb"}, {", b"}\n{", super().dump(texts, raw).strip(b"[]"))


class Header(Form):
    """What safetensors begin with: the length of a document, and it; tensors follow."""

    def load(self, raw: bytes) -> Any:
        return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])

    def dump(self, texts: str, raw: bytes) -> bytes:
        header = super().dump(texts, raw)
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        return len(header).to_bytes(8, "little") + header + data


class NoForm(Form):
    """No JSON at all."""

    def load(self, raw: bytes) -> Any:
        raise ValueError("bytes")


@dataclasses.dataclass(frozen=True)
class Fed:
    """What a reader is fed with.

    Attributes:
      raw: the real file, which is damaged.
      read: takes the damaged one.
      weight: how often.
      form: of the file.
    """

    raw: bytes
    read: Callable[[bytes], None]
    weight: float
    form: Form = dataclasses.field(default_factory=Form)


# --- readers --------------------------------------------------------------------------------------


class Clock:
    """Time that passes in ``sleep`` alone."""

    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs


class FileReaders:
    """The readers, with a folder of their own.

    Args:
      step: a real step of this package, whose files are replaced one at a time.
      folder: for other files.
    """

    def __init__(self, step: Any, folder: Path) -> None:
        self._step = step
        self._folder = folder
        for name in ("leased", "durable", "local", "events", "tensors", "indexed", "1/assets"):
            (folder / name).mkdir(parents=True)
        now = Clock.now
        holder = LeaseHolder("t1", "tpu-vm-7", 4711, "another kernel", 99, now - 600, now - 10)
        events = [
            Event("started", now, None, {"host": "a", "pid": 1, "keeps": [{"n": 3}], "steps": [1]}),
            Event("restored", now + 1, 1, {"secs": 2.5, "is_verified": True, "tier": "local"}),
            Event("saving", now + 2, 2, {"num_steps": 5, "interval_secs": 60.5}),
            Event("durable", now + 3, 2, {"durable_secs": 1.5, "num_bytes": 2**40}),
            Event("saving", now + 4, 3, {"num_skipped": 2}),
            Event("failed", now + 5, 3, {"secs": 1.0, "error": "no space"}),
            Event("deleted", now + 6, 2, {"steps": [1, 2]}),
            Event("closed", now + 7),
        ]
        shardings = Path(step.path, "state", "_sharding").read_bytes()
        metadata = Path(step.path, "state", "_METADATA").read_bytes()
        tensors: dict[str, np.ndarray] = {
            "a.w": np.arange(12, dtype=np.float32).reshape(3, 4),
            "b": np.arange(3),
        }
        plain = safetensors.numpy.save(tensors, {"c": "a.w"})
        (folder / "indexed" / "one.safetensors").write_bytes(plain)
        index = json.dumps(
            {"metadata": {}, "weight_map": dict.fromkeys(tensors, "one.safetensors")}
        )
        with torchax_backend.native_torch():
            weights = {name: torch.from_numpy(array) for name, array in tensors.items()}
            saved = io.BytesIO()
            torch.save({"model": {**weights, "tied": weights["b"]}, "epoch": 3}, saved)
            save_dcp({"model": weights}, folder / "dcp")
        archive = saved.getvalue()
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            (self._pickle_name,) = (n for n in members.namelist() if n.endswith("/data.pkl"))
            self._members = {n: members.read(n) for n in members.namelist()}
        (chunks,) = (folder / "dcp").glob("*.distcp")
        self.by_name = {
            "lease": Fed(holder.to_bytes(), self.lease, 0.10),
            "run": Fed(f"local {_HEX} {_HEX[::-1]}".encode(), self.run, 0.06, NoForm()),
            "events": Fed(b"".join(e.to_line() for e in events), self.events, 0.14, Lines()),
            "assets": Fed(
                Assets.of({"model/config.json": "{}", "tokenizer/a.txt": "ä"}).content,
                self.assets,
                0.06,
            ),
            "names of Orbax": Fed(metadata, self.names_of_orbax, 0.06),
            "shardings": Fed(shardings, self.shardings, 0.06),
            "safetensors": Fed(plain, self.safetensors, 0.12, Header()),
            "index": Fed(index.encode(), self.index, 0.10),
            "torch archive": Fed(archive, self.torch_archive, 0.10, NoForm()),
            "torch pickle": Fed(
                self._members[self._pickle_name], self.torch_pickle, 0.12, NoForm()
            ),
            "dcp metadata": Fed((folder / "dcp/.metadata").read_bytes(), self.dcp, 0.08, NoForm()),
            "dcp chunk": Fed(chunks.read_bytes(), self.dcp_chunk, 0.06, NoForm()),
        }
        self._chunks = chunks

    def lease(self, raw: bytes) -> None:
        """A lease, up to one that is held; it is never another's for longer than it may be."""
        clock = Clock()
        (self._folder / "leased" / "lease").write_bytes(raw)
        lease = Lease(self._folder / "leased", clock=clock, sleep=clock.sleep)
        try:
            lease.hold()
            assert clock.now - Clock.now <= LEASE_SECS + 1
        finally:
            lease.release()
            (self._folder / "leased" / "lease").unlink(missing_ok=True)

    def run(self, raw: bytes) -> None:
        """The name of a run, as of either tier, up to a new one."""
        durable, local = (epath.Path(self._folder / name) for name in ("durable", "local"))
        for directory in (durable, local):
            (directory / run_identity.NAME).write_bytes(raw)
        of_durable = RunName(durable, Summaries(), list, None)
        name = RunName(local, Summaries(), list, of_durable)
        step = CommittedStep(1, local / "1", 1)
        assert not name.ours([step])  # the word "local" is in both files or in none
        name.write([run_identity.new()])
        name.others(of_durable.names(), [step])

    def events(self, raw: bytes) -> None:
        """A record of events, up to what a report draws."""
        folder = epath.Path(self._folder)
        (folder / journal.FOLDER / _EVENTS_FILE).write_bytes(raw)
        runs = timeline.runs_of(journal.read_events(folder), is_running=False)
        for run in runs:
            timeline.steps_over_time(run)
            assert all(save.step is None or save.step >= 0 for save in run.saves)
        timeline.bytes_over_time(runs)
        journal.latest_start(folder)

    def assets(self, raw: bytes) -> None:
        """What a model is, with a seal that fits if it can; no name leads out of a folder."""
        seal = "0" * 16
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
            document = json.loads(raw)
            document.pop("xxh3_64", None)  # else few would come further than the seal
            content = seals.seal(document)
            raw, seal = json.dumps(content).encode(), seals.seal_of(content)
        (self._folder / "1" / "assets" / "data.json").write_bytes(raw)
        step = CommittedStep(1, epath.Path(self._folder / "1"), 1)
        for name, text in step_files.read_assets(step, seal).items():
            assert isinstance(text, str)
            assert (self._folder / name).resolve().is_relative_to(self._folder.resolve())

    def names_of_orbax(self, raw: bytes) -> None:
        """Orbax's list of a step's arrays, of which only the names are looked at."""
        with replaced(Path(self._step.path, "state", "_METADATA"), raw):
            array_checks.require_names_within(self._step.path, self._step.step)

    def shardings(self, raw: bytes) -> None:
        """What Orbax notes of shardings, up to words for people."""
        with replaced(Path(self._step.path, "state", "_sharding"), raw):
            found = StoredStep(self._step).shardings
        assert all(isinstance(text, str) for text in found.values())

    def safetensors(self, raw: bytes) -> None:
        """A file of safetensors, with its tensors."""
        self._tensors(self._file("w.safetensors", raw))

    def index(self, raw: bytes) -> None:
        """What Hugging Face writes beside several files."""
        path = self._folder / "indexed" / "model.safetensors.index.json"
        path.write_bytes(raw)
        self._tensors(path.parent)

    def torch_archive(self, raw: bytes) -> None:
        """A file of torch.save's."""
        self._tensors(self._file("w.pt", raw))

    def torch_pickle(self, raw: bytes) -> None:
        """What such a file describes its tensors by, with nothing else of it damaged."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for name, content in {**self._members, self._pickle_name: raw}.items():
                archive.writestr(name, content)
        self._tensors(self._file("w.pt", made.getvalue()))

    def dcp(self, raw: bytes) -> None:
        """The metadata of torch's distributed checkpoints."""
        with replaced(self._folder / "dcp" / ".metadata", raw):
            self._tensors(self._folder / "dcp")

    def dcp_chunk(self, raw: bytes) -> None:
        """A file of them that holds tensors."""
        with replaced(self._chunks, raw):
            self._tensors(self._folder / "dcp")

    def _file(self, name: str, raw: bytes) -> Path:
        path = self._folder / "tensors" / name
        path.write_bytes(raw)
        return path

    def _tensors(self, path: Path) -> None:
        files: TensorFiles = open_files(path)
        for tensor in files.tensors.values():
            if tensor.nbytes <= _MAX_READ_BYTES:
                assert np.array(tensor.mapped()).nbytes == tensor.nbytes
        assert not files.ties.keys() & files.tensors.keys()


@contextlib.contextmanager
def replaced(path: Path, raw: bytes) -> Iterator[None]:
    """A file with other content for a while."""
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(before)
