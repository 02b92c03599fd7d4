"""Says what must be left of a disturbed program: see ``disturbed.py``.

The oracle knows from the log what the processes did, and computes again what each step must hold.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import disturbed
from disturbed import Lineage, Settings, Training, as_lineage, digest, num_parts, read_log, up_to

from torchax_ckpt.options import TierName
from torchax_ckpt.policies.preservation import preserved
from torchax_ckpt.saving import run_history
from torchax_ckpt.storage.directory.run_directory import RunDirectory

Key = tuple[int, Lineage]
LOST, WRONG, LEFT = "durable steps lost", "wrong or failed restores", "times leftovers piled up"
RESTORED = "states restored and compared"
DIFFERED = "starts in which calls differed"
LINKED, HOST_LINKED = "looks at steps that share files", "looks at steps that share host leaves"


@dataclasses.dataclass
class Verdict:
    """What an oracle found at one look: row of the table -> sentences, and row -> number."""

    found: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: {LOST: [], WRONG: [], LEFT: []}
    )
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Oracle:
    """Looks at one run, again and again.

    A durable step must be resumed from if a process was told of it. A step of local tiers must be
    if the next start has as many processes, and the local directories together have every part of
    it. Where a program went back to a step, and what it saved since is in local tiers that a start
    with another number of processes cannot use, the run resumes from the step it went back to. All
    processes of a start that are told of calls that differ are told of the same two.
    """

    def __init__(
        self, directory: Path, log_path: Path, settings: Settings, can_read_local: bool = False
    ) -> None:
        self._directory, self._log_path, self._settings = directory, log_path, settings
        self._places = [directory, *[settings.local(directory)] * can_read_local]
        self._offset = 0
        self._durable: list[Key] = []  # one branch, oldest first
        self._begun: set[int] = set()  # branches begun since the newest durable step
        self._forks: set[Key] = set()  # gone back to since then
        self._back: Lineage = ()  # gone back to at last
        self._told: set[tuple[str, int, Lineage]] = set()
        self._local: Key | None = None
        self._count = 0  # of the processes that saved it
        self._parts: dict[int, int] = {}  # local directory -> which part of the step it has
        self._start: dict[str, Any] = {"count": 1}
        self._needs_local = False
        self._resumed: Key | None = None
        self._differing = ""  # the calls of the present start that were said to differ
        self._exports: dict[str, str] = {}  # name -> digest

    def inspect(self, is_finished: bool = False) -> Verdict:
        """Compares the log and the directories."""
        verdict = Verdict()
        lines, self._offset = read_log(self._log_path, self._offset)
        for line in lines:
            self._take_in(line, verdict)
        self._restore_all(verdict)
        self._look_at_links(verdict)
        for place in self._places:
            names = os.listdir(place) if place.exists() else []
            for prefix in ("writing-", "deleting-", "incoming-", "lease"):
                found = [name for name in names if name.startswith(prefix)]
                # A tier is cleaned up before the first save to it; not each program saves to both.
                is_clean = is_finished and len(self._places) == 1
                if len(found) > (0 if is_clean else 2):
                    verdict.found[LEFT].append(f"leftovers: {found}")
        for name, known in list(self._exports.items()):
            verdict.counts[RESTORED] += 1
            if (there := digest_of(self._directory.with_name("exports") / name)) != known:
                what = "differs" if there else "is gone"
                verdict.found[LOST].append(f"the export {name}, which was written, {what}")
                del self._exports[name]
        return verdict

    # --- what the processes say ---

    def _take_in(self, line: dict[str, Any], verdict: Verdict) -> None:
        match line["what"]:
            case "starting":
                self._start, self._resumed, self._differing = line, None, ""
                is_whole = set(self._parts.values()) == set(range(num_parts(self._count)))
                is_local = self._settings.has_local
                self._needs_local = is_local and line["count"] == self._count and is_whole
            case "wiped":
                self._parts.pop(line["place"], None)
            case "swapped":
                before = enumerate(line["places"])
                self._parts = {now: self._parts[b] for now, b in before if b in self._parts}
            case "resumed":
                self._check_resumed(line, verdict)
            case "back":
                self._begun.add(line["branch"])
                self._forks.add((line["step"], as_lineage(line["lineage"])))
                self._local, self._back = None, as_lineage(line["lineage"])
            case "restored":
                what = f"process {line['index']} went back to"
                self._compare(line["shards"], line["step"], self._back, what, verdict)
            case "delete":
                self._durable = [d for d in self._durable if d[0] != line["step"]]
                if self._local is not None and self._local[0] == line["step"]:
                    self._local = None
            case "told":
                self._take_told(line)
            case "differed":
                verdict.counts[DIFFERED] += not self._differing
                self._differing = self._differing or line["calls"]
                if line["calls"] != self._differing:
                    told = f"was told {line['calls']}, and another one {self._differing}"
                    verdict.found[WRONG].append(f"process {line['index']} {told}")
            case "exported":
                self._exports[line["name"]] = line["digest"]
            case "removed":
                self._exports.pop(line["name"], None)

    def _take_told(self, line: dict[str, Any]) -> None:
        step, lineage = line["step"], as_lineage(line["lineage"])
        for tier in line["tiers"]:
            if (tier, step, lineage) in self._told:
                continue  # by another process
            self._told.add((tier, step, lineage))
            if tier == "durable" or len(self._places) > 1:
                self._note_durable(step, lineage)
            if tier == "local":
                self._local = (step, up_to(lineage, step))
                self._count = self._start["count"]
                places = range(self._count)
                self._parts = {place: place % num_parts(self._count) for place in places}

    def _check_resumed(self, line: dict[str, Any], verdict: Verdict) -> None:
        step, lineage = line["step"], as_lineage(line["lineage"])
        subject = f"process {line['index']} of {self._start['count']} resumed from"
        verdict.counts[RESTORED] += 1
        if self._resumed not in (None, (step, lineage)):
            others = f"step {step} of {lineage}, others {self._resumed}"
            verdict.found[WRONG].append(f"{subject} {others}")
        self._resumed = (step, lineage)
        self._compare(line["shards"], step, lineage, subject, verdict)
        index, count, at = line["own"]
        if step and (index, at) != (line["index"] % count, step):
            verdict.found[WRONG].append(f"{subject} step {step} with the state of {line['own']}")
        if (step, up_to(lineage, step)) in self._forks:
            self._begun.add(line["branch"])  # as if this program had gone back
        else:
            self._require_newest(step, lineage, subject, verdict)
        if not self._needs_local:
            self._local = None  # the run goes on without it
        elif self._local is not None:
            local, branch = self._local
            if step < local or up_to(lineage, local) != branch:
                what = f"step {step} of {lineage}, but the local step {local} of {branch}"
                verdict.found[LOST].append(f"{subject} {what} had been reported durable")

    def _note_durable(self, step: int, lineage: Lineage) -> None:
        key = (step, up_to(lineage, step))
        if self._durable and self._durable[-1] == key:
            return  # what is found again says nothing of branches begun since
        ancestors = [d for d in self._durable if d[0] < step and up_to(lineage, d[0]) == d[1]]
        self._durable = [*ancestors, key]
        self._begun.clear()
        self._forks.clear()

    def _require_newest(self, step: int, lineage: Lineage, subject: str, verdict: Verdict) -> None:
        if not self._durable or any(branch in self._begun for _, branch in lineage):
            return
        durable, branch = self._durable[-1]
        if step < durable or up_to(lineage, durable) != branch:
            what = f"step {step} of {lineage}, but step {durable} of {branch}"
            verdict.found[LOST].append(f"{subject} {what} had been reported durable")

    # --- what there is ---

    def _compare(
        self, shards: list[Any], step: int, lineage: Lineage, subject: str, verdict: Verdict
    ) -> None:
        """Notes which shards are not those of this step."""
        arrays = disturbed.values(step, up_to(lineage, step))
        wrong = {
            name
            for name, bounds, found in shards
            if digest(arrays[name][tuple(slice(*part) for part in bounds)]) != found
        }
        wrong |= {name for name, *_ in shards} ^ arrays.keys()
        if wrong:
            verdict.found[WRONG].append(f"{subject} step {step}: arrays {sorted(wrong)} are wrong")

    def _restore_all(self, verdict: Verdict) -> None:
        restored = Training()
        newest: Key = (0, ())
        tiers: list[TierName] = ["durable", "local"]
        del tiers[len(self._places) :]
        with (
            warnings.catch_warnings(),
            self._settings.opened(self._directory, has_local=len(tiers) > 1) as reader,
        ):
            warnings.simplefilter("ignore")
            steps = sorted((step, tier) for tier in tiers for step in reader.all_steps(tier))
            if steps and not _attempt(lambda: restored.attach_to(reader), "the run", verdict):
                steps = []
            for step, tier in steps:
                what = f"step {step} of the {tier} tier"
                if _attempt(lambda: reader.restore(step, tier=tier), what, verdict):  # noqa: B023
                    verdict.counts[RESTORED] += 1
                    newest = (step, restored.lineage)
                    self._compare(restored.shards(), *newest, what, verdict)
        self._require_newest(*newest, "the newest that can be restored is", verdict)
        if newest[0] and not verdict.found[LOST]:
            self._note_durable(*newest)  # what was there once must stay

    def _look_at_links(self, verdict: Verdict) -> None:
        """Checks that neighbours share no files, and that the newest step is whole by itself."""
        run = RunDirectory(self._directory, read_only=True)
        committed = run.steps()
        places = {s.step: Path(s.path) for s in committed}  # some may be called incoming-*
        steps = list(places)
        used = {
            step: {path.stat().st_ino for path in (place / "state").rglob("d/*")}
            for step, place in places.items()
        }
        hosts = {step: files_of_host_leaves(place) for step, place in places.items()}
        for number, (before, after) in enumerate(itertools.pairwise(steps)):
            # Between others, a step was saved that has gone since.
            if after == before + 1 and used[before] & used[after]:
                # A step may share files with one that is about to be deleted, if an older one stays
                # that has files of its own.
                infos = run_history.checkpoint_infos(run, committed[: number + 2])
                is_kept = preserved(self._settings.keep, infos, [False] * len(infos))[number]
                if is_kept or all(used[step] & used[after] for step in steps[:number]):
                    verdict.found[WRONG].append(f"steps {before} and {after} share files")
        for row, files in ((LINKED, used), (HOST_LINKED, hosts)):
            pairs = itertools.permutations(steps, 2)
            verdict.counts[row] += len({a for a, b in pairs if files[a] & files[b]})
        for step in steps[-1:]:
            alone = self._log_path.with_name("alone")
            shutil.rmtree(alone, ignore_errors=True)
            shutil.copytree(places[step], alone / str(step))
            restored, what = Training(), f"step {step} by itself"
            with self._settings.opened(alone, has_local=False) as reader:
                if _attempt(lambda: restored.attach_to(reader), what, verdict):  # noqa: B023
                    self._compare(restored.shards(), step, restored.lineage, what, verdict)


def files_of_host_leaves(step: Path) -> set[int]:
    """The files of unchanged leaves on the host, equal for links to one file."""
    files = set()
    for manifest in step.glob("manifest/data.json"):  # there is none in half a step
        for name, database in json.loads(manifest.read_text()).get("unchanged", {}).items():
            if "model/table" in database["xxh3_128"]:
                found = step.glob(f"state/ocdbt.process_{name}*/**/d/*")
                files |= {path.stat().st_ino for path in found}
    return files


def digest_of(path: Path) -> str:
    """Of all bytes of a file, or of a folder with all names in it; "" if nothing is there."""
    if not path.exists():
        return ""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path)}\n{file.stat().st_size}\n".encode())
        content.update(file.read_bytes())
    return content.hexdigest()


def _attempt(call: Callable[[], Any], what: str, verdict: Verdict) -> bool:
    try:
        call()
    except Exception as error:  # whatever it is, it is a finding
        text = f"{what} is listed, but cannot be restored: {str(error)[:200]}"
        verdict.found[WRONG].append(text)
        return False
    return True
