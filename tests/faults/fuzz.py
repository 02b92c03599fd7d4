"""Feeds the readers of a checkpoint what nobody wrote, and looks at what comes out of them.

    python -m tests.faults.fuzz --inputs 100000

Inputs are mutations of a real step's JSON, of the other files of a run, and of files that weights
are imported from: nodes cut, doubled, swapped and replaced by others, by documents of the
manifest's own grammar and by extremes; and bytes flipped, cut and repeated. Half of them are drawn
by hypothesis. Each goes through a reader as far as that reader goes, up to live objects. Whatever
the input:

- nothing but a ``CheckpointError`` comes out, and it can be printed;
- it takes at most ``MAX_SECS``, and the process at most ``MAX_BYTES`` more than before;
- what is live after a failure is, to the bit, what it was before.

Input ``n`` of a seed is always the same one, so a finding is seen again with ``--first n
--inputs 1``; what hypothesis draws, in batches of ``BATCH``, with the number of its batch's first.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import faulthandler
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX is imported, as conftest.py does
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import hypothesis
import jax
import numpy as np
import torch
import torchax
from etils import epath
from fuzz_drawn import Damage, changed, changed_bytes, damage, places
from fuzz_files import Fed, FileReaders, Form, replaced
from fuzz_runs import RunReaders
from hypothesis import strategies as st
from support.compare import bits
from support.training import mlp

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError
from torchax_ckpt.layout.manifest import KINDS, STORABLE_DTYPES, Manifest
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS
from torchax_ckpt.restoring import restore
from torchax_ckpt.snapshot.move_shards import put
from torchax_ckpt.state import findings, functional, node_checks, random_state
from torchax_ckpt.state.training_state import TrainingState
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.stored.stored_step import StoredStep

MAX_SECS = 5.0
MAX_BYTES = 1 << 30
# What one restore may be given; more than that would not have passed the look at array metadata.
_MAX_READ_BYTES = 1 << 24

# So many inputs are of one number for hypothesis.
BATCH = 1000


# --- inputs --------------------------------------------------------------------------------------

_SEAL = "xxh3_64"
_TAGS = (
    "dict", "OrderedDict", "Counter", "tuple", "set", "frozenset", "namedtuple", "pytree", "float",
    "int", "complex", "bytes", "scalar", "array", "ties", "class", "group", "zebra",
)  # fmt: skip
_EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "0x", "..", "../../x", "/etc/passwd", "\ud800", "\x00", "%",
    "*", "é" * 40, "x" * 5000, [], {}, [[]], [{}], {"": None}, [1, 2, 3], "params", "lr",
)  # fmt: skip


def grown(source: random.Random, names: list[str], depth: int = 0) -> Any:
    """A document of the manifest's grammar, or nearly."""
    if depth > 5 or source.random() < 0.3:
        return copy.deepcopy(source.choice(_EXTREMES))  # it is changed in place later
    children = [grown(source, names, depth + 1) for _ in range(source.randrange(4))]
    match source.randrange(7):
        case 0:
            return children
        case 1:
            return {
                "array": source.choice([*names, "model/new", "stateful/box/new"]),
                "kind": source.choice(sorted(KINDS)),
                "dtype": source.choice(sorted(STORABLE_DTYPES)),
                "shape": [source.choice([0, 1, 2, 3, 16, 2**20, 2**40])] * source.randrange(4),
                **source.choice([{}, {"impl": "threefry2x32"}, {"impl": "zebra"}, {"weak": True}]),
            }
        case 2:
            return {
                source.choice(_TAGS): [
                    [source.choice([*names, 1, "a", {"tuple": [1]}]), c] for c in children
                ]
            }
        case 3:
            return {source.choice(_TAGS): children}
        case 4:
            return {source.choice(_TAGS): copy.deepcopy(source.choice(_EXTREMES))}
        case 5:
            node: Any = children
            for _ in range(source.choice([10, 90, 130, 400])):
                node = [node] if source.random() < 0.9 else {"tuple": [node]}
            return node
        case _:
            return {source.choice(_TAGS): c for c in children}


def damaged_document(source: random.Random, document: Any) -> Any:
    """The document with some of its nodes changed, in place."""
    names = sorted({c[k] for c, k in places(document) if k == "array" and isinstance(c[k], str)})
    for _ in range(source.choice([1, 1, 1, 2, 3, 8])):
        everywhere = places(document)
        if not everywhere:
            return document
        container, key = source.choice(everywhere)
        other, other_key = source.choice(everywhere)
        match source.randrange(7):
            case 0:
                container[key] = copy.deepcopy(source.choice(_EXTREMES))
            case 1:
                container[key] = grown(source, names)
            case 2:
                del container[key]
            case 3:
                container[key] = copy.deepcopy(other[other_key])
            case 4:
                container[key], other[other_key] = (
                    copy.deepcopy(other[other_key]),
                    copy.deepcopy(container[key]),
                )
            case 5 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case 5:
                container[source.choice(_TAGS)] = container.pop(key)
            case _ if isinstance(container[key], list):
                source.shuffle(container[key])
            case _:
                container[key] = [container[key]]
    return document


def damaged_bytes(source: random.Random, raw: bytes) -> bytes:
    """The bytes with some of them changed."""
    data = bytearray(raw)
    for _ in range(source.choice([1, 1, 2, 5, 20])):
        at = source.randrange(len(data) + 1)
        match source.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << source.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + source.randrange(1, 64)]
            case 3:
                data[at:at] = data[at : at + source.randrange(1, 256)]
            case 4:
                junk = (b"[", b"{", b'"', b",", b"\\ud800", b"1e999", b"NaN", b"9" * 50, b"\x00")
                data[at:at] = source.choice(junk)
            case _:
                data[at:at] = source.choice((b"[" * 3000, b'{"a":' * 1000, b"9" * 5000))
    return bytes(data)


def damaged(source: random.Random, raw: bytes, form: Form) -> bytes:
    """One input from a real file."""
    if source.random() < 0.2:
        return damaged_bytes(source, raw)
    try:
        document = form.load(raw)
    except ValueError:  # no JSON
        return damaged_bytes(source, raw)
    try:
        seal = document.pop(_SEAL, None) if isinstance(document, dict) else None
        if source.random() < 0.05 and isinstance(document, dict):
            document["document"] = {"state": grown(source, ["state/w"])}
        else:
            document = damaged_document(source, document)
        if seal is not None and isinstance(document, dict):
            document = seals.seal(document)
        return form.dump(json.dumps(document), raw)
    except RecursionError:  # deeper than Python writes
        return damaged_bytes(source, raw)


def drawn(raw: bytes, form: Form, damage: Damage) -> bytes:
    """One input from a real file and what hypothesis has drawn."""
    of_document, of_bytes = damage
    try:
        document = form.load(raw)
        if isinstance(document, dict):
            document.pop(_SEAL, None)
        return changed_bytes(form.dump(changed(document, of_document), raw), of_bytes)
    except (ValueError, RecursionError):  # no JSON
        more = [("flip", at, other, b"\0") for _, at, other, _ in of_document]
        return changed_bytes(raw, of_bytes or more)


# --- what is fed ---------------------------------------------------------------------------------


class Box:
    """A stateful object that takes any state."""

    def __init__(self) -> None:
        with torchax_backend.native_torch():
            count = torch.tensor(2**40)
        self.state: Any = {
            "seen": 3,
            "loss": [0.5, float("nan"), (1, 2)],
            "count": count,
            "table": np.arange(6, dtype=np.int8),
            "empty": np.zeros((0, 3), np.float32),
            "keys": {1: "int", "1": "str", (2, None): b"raw", np.int8(3): {4, "5"}},
            "key": jax.random.key(1),
        }

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, dict) and "seen" not in state:
            raise KeyError("seen")
        self.state = state


class Extra(torch.nn.Module):
    """A module with extra state, a tie and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.tied = self.body
        self.register_buffer("mean", torch.zeros(3, device="jax"))
        self.extra: Any = {"epoch": 1}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = {"epoch": state["epoch"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Live:
    """The objects of one run, all of them attached."""

    def __init__(self) -> None:
        self.model = Extra()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.box = Box()
        self.attachments: dict[str, Any] = {
            "lr_scheduler": self.scheduler,
            "stateful": {"box": self.box},
        }
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.attached = TrainingState(self.model, self.optimizer, **self.attachments)

    def digest(self) -> str:
        """All that is live, to the bit."""
        with torchax_backend.native_torch():
            rng = torch.get_rng_state()
        parts = [
            {n: bits(t) for n, t in self.model.state_dict(keep_vars=True).items() if _is_tensor(t)},
            self.model.extra,
            self.optimizer.param_groups,
            [self.optimizer.state.get(p) for p in self.model.parameters()],
            {k: v for k, v in vars(self.scheduler).items() if k != "optimizer"},
            self.box.state,
            [rng, torchax_backend.prng_key(), np.random.get_state(legacy=False)],
        ]
        plain = [_plain(part) for part in parts]
        return hashlib.sha256(repr((plain, random.getstate())).encode()).hexdigest()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, jax.Array, np.ndarray, np.generic))


def _plain(value: Any) -> Any:
    if _is_tensor(value):
        return bits(value)
    if isinstance(value, Mapping):
        return [(_plain(k), _plain(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_plain(v) for v in value)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(v)) for v in value)
    return getattr(value, "__qualname__", None) or repr(value)


class Corpus:
    """A real run of two steps, and copies of it to damage."""

    def __init__(self, folder: Path) -> None:
        self.live = Live()
        self.run = folder / "run"
        keep = policies.PreserveAll()
        with TorchaxCheckpointer(self.run, preservation_policy=keep) as ckpt:
            ckpt.attach(self.live.model, self.live.optimizer, **self.live.attachments)
            for step in (1, 2):
                ckpt.save(step, force=True, metrics={"loss": 1.0})
                ckpt.wait_until_finished()
                # Else few commit records would come further than their seal.
                (self.run / str(step) / "commit_success.txt").write_text("committed")
        self.pristine = folder / "pristine"
        shutil.copytree(self.run, self.pristine)
        self.step = self.run / "2"
        self.manifest = (self.step / "manifest" / "data.json").read_bytes()
        self.summary = (self.step / "summary" / "data.json").read_bytes()
        self.record = (self.step / "_CHECKPOINT_METADATA").read_bytes()
        self.mark = commit_record.sealing(epath.Path(self.step), "").strip().encode()
        self.committed = CommittedStep(2, epath.Path(self.step), 1)
        self.files = FileReaders(self.committed, folder / "files")
        self.runs = RunReaders(folder / "runs")
        stored = StoredStep(self.committed)
        self.array_metadata = _array_metadata(self.step)
        reads = self.live.attached.prepare(stored.document, findings.Findings()).reads
        read = stored.read_leaves(reads)
        self.values = {name: np.asarray(value) for name, value in read.items()}


def _array_metadata(step: Path) -> bytes:
    import tensorstore as ts

    base = {"driver": "file", "path": f"{step / 'state'}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return store.read("model.body.0.weight/.zarray").result().value


# --- readers -------------------------------------------------------------------------------------


class Readers:
    """The readers, each fed with the bytes of one file.

    Args:
      corpus: real steps and what is live.
      check: makes a manifest of JSON; the package's own, or a naive one that shows that the
        harness finds things.
    """

    def __init__(self, corpus: Corpus, check: Callable[[Any], Manifest] | None = None) -> None:
        self.corpus = corpus
        self._check = check or self._checked
        self.by_name = {
            "restore": Fed(corpus.manifest, self.restore, 0.50),
            "load": Fed(corpus.manifest, self.load, 0.30),
            "array metadata": Fed(corpus.array_metadata, self.array_metadata, 0.11),
            "commit record": Fed(corpus.record, self.commit_record, 0.04),
            "mark": Fed(corpus.mark, self.mark, 0.04),
            "summary": Fed(corpus.summary, self.summary, 0.04),
            "whole restore": Fed(corpus.manifest, self.whole_restore, 0.01),
            **corpus.files.by_name,
            **corpus.runs.by_name,
        }

    @staticmethod
    def _checked(document: Any) -> Manifest:
        manifest = Manifest.from_json(document, path="manifest")
        node_checks.check_document(manifest.document)
        return manifest

    def _manifest(self, raw: bytes) -> Manifest:
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:  # as storage does
            raise CorruptCheckpointError(f"no JSON: {error}") from error
        if isinstance(document, dict):
            document.pop(_SEAL, None)  # else few would come further than the seal
        return self._check(document)

    def _values(self, reads: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
        """What storage would give: the real arrays, and zeros where the manifest wants others."""
        manifest.stored(reads)
        if sum(read.spec.nbytes for read in reads.values()) > _MAX_READ_BYTES:
            raise CorruptCheckpointError("array metadata says otherwise")
        arrays = {}
        for name, read in reads.items():
            array = self.corpus.values.get(name)
            zeros = np.zeros(read.spec.shape, np.dtype(read.spec.dtype))
            if array is None or (array.shape, array.dtype) != (zeros.shape, zeros.dtype):
                array = zeros
            arrays[name] = array.copy()
        return put(arrays, {name: read.placement for name, read in reads.items()})

    def restore(self, raw: bytes) -> None:
        """A manifest, up to live objects; array data comes from memory."""
        manifest = self._manifest(raw)
        differences = findings.Findings()
        with random_state.left_alone(on_success=False):
            restoration = self.corpus.live.attached.prepare(manifest.document, differences)
            if len(raw) % 2 and differences:  # the other half as restore(strict=False)
                raise differences.error(2, "run/2")
            restoration.apply(self._values(restoration.reads, manifest))

    def load(self, raw: bytes) -> None:
        """A manifest, up to loaded values."""
        manifest = self._manifest(raw)
        model = {
            name.partition("/")[2]: jax.ShapeDtypeStruct(value.shape, value.dtype)
            for name, value in self.corpus.values.items()
            if name.startswith("model/")
        }
        for abstract in (None, {"model": model}):
            nodes = [[n, d] for n, d in manifest.document.items() if not abstract or n in abstract]
            differences = findings.Findings()
            request = functional.Request({"dict": nodes}, abstract, (), differences)
            if differences:
                raise differences.error(2, "run/2")
            request.build(self._values(request.reads, manifest))

    def array_metadata(self, raw: bytes) -> None:
        """One array's metadata. What passes is of the shape and dtype asked for."""
        shape, dtype = (16, 8), "float32"
        if problem := array_checks._problem(raw, shape, dtype):
            raise CorruptCheckpointError(" ".join(problem))
        metadata = json.loads(raw)
        assert (tuple(metadata["shape"]), np.dtype(metadata["dtype"])) == (shape, dtype)

    def commit_record(self, raw: bytes) -> None:
        """A commit record, up to the list of steps."""
        with replaced(self.corpus.step / "_CHECKPOINT_METADATA", raw):
            self._list()

    def mark(self, raw: bytes) -> None:
        """The digests in a commit mark, up to the list of steps."""
        with replaced(self.corpus.step / commit_record.MARK, b"committed\n" + raw):
            self._list()

    def summary(self, raw: bytes) -> None:
        """A summary, up to policies and the list of steps."""
        with replaced(self.corpus.step / "summary" / "data.json", raw):
            self._list()

    def _list(self) -> None:
        directory = RunDirectory(self.corpus.run)
        infos = [directory.info(step) for step in directory.steps()]
        for info in infos:
            assert info.time.year < 2263
        policies.BestN(metric="loss").should_preserve(infos, context=policies.PreservationContext())

    def whole_restore(self, raw: bytes) -> None:
        """A manifest, up to live objects, from disk."""
        with replaced(self.corpus.step / "manifest" / "data.json", raw):
            options = CheckpointOptions()
            source = StoredStep(self.corpus.committed, options)
            source.require_restorable()
            restore.restore_attached(
                source, self.corpus.live.attached, True, options, SINGLE_PROCESS
            )


# --- the loop ------------------------------------------------------------------------------------


class Findings:
    """What came out.

    Attributes:
      problems: one text for each input that did what no input may do.
      outcomes: reader and outcome -> how many inputs.
      slowest_secs: of one input.
      grown_bytes: by how much the process's peak memory has grown.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.slowest_secs = 0.0
        self.grown_bytes = 0

    def __str__(self) -> str:
        lines = [
            f"{n:8d}  {reader}: {outcome}" for (reader, outcome), n in sorted(self.outcomes.items())
        ]
        lines.append(f"slowest input {self.slowest_secs:.2f} s")
        lines.append(f"peak memory grew by {self.grown_bytes >> 20} MiB")
        lines.append(f"{len(self.problems)} problems")
        return "\n".join([*lines, *self.problems[:10]])


def inputs(readers: Readers, seed: int, first: int, count: int) -> Iterator[tuple[int, str, bytes]]:
    """Number, reader and bytes of each input."""
    names = list(readers.by_name)
    weights = [readers.by_name[name].weight for name in names]
    for number in range(first, first + count):
        source = random.Random(f"{seed}/{number}")
        (name,) = source.choices(names, weights)
        fed = readers.by_name[name]
        yield number, name, damaged(source, fed.raw, fed.form)


class Fuzzing:
    """Feeds inputs, one after the other; ends the process at one that hangs.

    Args:
      readers: what is fed.
      max_secs: as many inputs as this allows; None for all.
      hang_secs: how long one may take.

    Attributes:
      found: what came out so far.
    """

    def __init__(
        self, readers: Readers, max_secs: float | None = None, hang_secs: float | None = None
    ) -> None:
        self.found = Findings()
        self._readers = readers
        self._until = None if max_secs is None else time.monotonic() + max_secs
        self._hang_secs = hang_secs
        readers.restore(readers.corpus.manifest)
        self._before = readers.corpus.live.digest()
        self._peak = _peak_bytes()

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._until is not None and time.monotonic() > self._until

    def feed(self, number: int, name: str, raw: bytes) -> None:
        """Feeds one input."""
        found, readers = self.found, self._readers
        if self._hang_secs is not None:
            faulthandler.dump_traceback_later(self._hang_secs, exit=True)
        began = time.monotonic()
        problem = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                readers.by_name[name].read(raw)
            outcome = "read"
        except CheckpointError as error:
            outcome = type(error).__name__
            str(error).encode("utf-8", "backslashreplace")
        except Exception as error:
            outcome = f"!! {type(error).__name__}"
            problem = traceback.format_exc(limit=-6)
        secs = time.monotonic() - began
        found.slowest_secs = max(found.slowest_secs, secs)
        if secs > MAX_SECS:
            problem = f"took {secs:.1f} s"
        if readers.corpus.live.digest() != self._before:
            if outcome != "read":
                problem = (problem or "") + f"{outcome}, and what is live has changed"
            _mended(readers, self._before)
        found.outcomes[name, outcome] += 1
        if problem is not None:
            found.problems.append(f"input {number} ({name}): {problem}")
        found.grown_bytes = _peak_bytes() - self._peak

    def end(self) -> Findings:
        """What came out."""
        faulthandler.cancel_dump_traceback_later()
        if self.found.grown_bytes > MAX_BYTES:
            self.found.problems.append(f"peak memory grew by {self.found.grown_bytes >> 20} MiB")
        return self.found


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz(
    readers: Readers, *, seed: int = 0, first: int = 0, count: int, **limits: float | None
) -> Findings:
    """Feeds so many inputs, or as many as the time allows; half of them drawn by hypothesis."""
    fuzzing = Fuzzing(readers, **limits)
    for start in range(first, first + count, BATCH):
        number = min(BATCH, first + count - start)
        for one in inputs(readers, seed, start, number - number // 2):
            if fuzzing.is_over:
                return fuzzing.end()
            fuzzing.feed(*one)
        if number // 2:
            _draw(fuzzing, readers, seed, start, number // 2)
        if limits.get("hang_secs") is not None:
            print(f"input {start + number}", file=sys.stderr)
    return fuzzing.end()


def _draw(fuzzing: Fuzzing, readers: Readers, seed: int, first: int, count: int) -> None:
    """Feeds what hypothesis draws, which is the same of every seed and number of the first."""
    names = sorted(readers.by_name)
    # As often as their weights say, of a hundred.
    drawn_from = [n for n in names for _ in range(max(1, round(100 * readers.by_name[n].weight)))]

    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed << 32 | first)
    @hypothesis.given(st.sampled_from(drawn_from), damage)
    def feed(name: str, how: Damage) -> None:
        if not fuzzing.is_over:
            # Hypothesis seeds these for each input; a restore that fails must leave them alone.
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
            fed = readers.by_name[name]
            fuzzing.feed(first, name, drawn(fed.raw, fed.form, how))

    numbers = random.getstate(), np.random.get_state(legacy=False)
    feed()


def _mended(readers: Readers, digest: str) -> Live:
    """Live objects that hold the real step's state again; new ones where they cannot be mended."""
    with contextlib.suppress(Exception):
        readers.restore(readers.corpus.manifest)
        if readers.corpus.live.digest() == digest:
            return readers.corpus.live
    readers.corpus.live = Live()
    readers.restore(readers.corpus.manifest)
    assert readers.corpus.live.digest() == digest, "the real step restores the same state again"
    return readers.corpus.live


def main() -> None:
    """Feeds as many inputs as the command line says; exits with 1 if one did harm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--secs", type=float, default=None, help="stop after so many")
    options = parser.parse_args()
    torchax.enable_globally()
    logging.disable(logging.WARNING)  # hundreds of thousands of times the same
    with tempfile.TemporaryDirectory() as folder:
        readers = Readers(Corpus(Path(folder)))
        found = fuzz(
            readers,
            seed=options.seed,
            first=options.first,
            count=options.inputs,
            max_secs=options.secs,
            hang_secs=20 * MAX_SECS,
        )
    print(found)
    print(f"{sum(found.outcomes.values())} inputs")
    sys.exit(bool(found.problems))


if __name__ == "__main__":
    main()
