"""A program that copies and exports steps until it is killed, and the oracle of what must be left.

The steps come from a run on a medium that forgets nothing. They are copied one by one, in their
order; when all are there, they are deleted, and copied again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killed_run import Log, Oracle, Phase, Settings, Verdict, enable_torchax, read_log

from torchax_ckpt.cli import convert
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.copy import copy_steps

KINDS = {"pt": ".pt", "dcp": "", "safetensors": "", "file": ".safetensors"}
NUM_EXPORTS = 3


def digest(path: Path) -> str:
    """Of all bytes of a file, or of a folder with all names in it; "" if nothing is there."""
    if not path.exists():
        return ""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path)}\n{file.stat().st_size}\n".encode())
        content.update(file.read_bytes())
    return content.hexdigest()


def run(
    source: Path,
    source_log: Path,
    directory: Path,
    log: Log,
    phase: Phase,
    attempt: int,
    seed: int,
    num_actions: int | None,
    settings: Settings,
    on_durable: Callable[[], None],
) -> None:
    """Copies, exports and deletes, forever or so many times."""
    enable_torchax()
    choose = random.Random(seed)
    told = [line for line in read_log(source_log, 0)[0] if line["what"] == "durable"]
    details = {line["step"]: {k: v for k, v in line.items() if k != "what"} for line in told}
    steps = {s.step: s for s in RunDirectory(source).steps() if s.step in details}
    assert len(steps) > NUM_EXPORTS
    exports = directory.with_name("exports")
    phase.watch_package()
    phase.say_saved()
    with phase("training"):
        for action in range(num_actions) if num_actions is not None else itertools.count():
            there = [s.step for s in RunDirectory(directory).steps()]
            left = [step for step in steps if step > max(there, default=0)]
            if there and choose.random() < 0.4:
                kind = choose.choice(list(KINDS))
                out = exports / f"{attempt:06d}-{action:06d}{KINDS[kind]}"
                export(directory, choose.choice(there), out, kind)
                log("exported", name=out.name, digest=digest(out))
                for old in sorted(exports.iterdir())[:-NUM_EXPORTS]:
                    log("removed", name=old.name)
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            elif left:
                assert copy_steps([steps[left[0]]], RunDirectory(directory))
                on_durable()
                log("durable", **details[left[0]])
            else:
                with settings.opened(directory) as ckpt, phase("deleting"):
                    for step in there:
                        log("delete", step=step)
                        ckpt.delete(step)


def export(directory: Path, step: int, out: Path, kind: str) -> None:
    """Runs the command."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        convert.export(
            str(directory),
            [str(step), str(out)],
            format="safetensors" if kind == "file" else kind,
            max_shard_size="200B" if kind == "safetensors" else None,
            as_json=True,
        )


class CopiedOracle(Oracle):
    """Knows of copies what ``Oracle`` knows of saves; and of each export what it held."""

    def __init__(self, directory: Path, log_path: Path, settings: Settings) -> None:
        super().__init__(directory, log_path, settings)
        self._exports = directory.with_name("exports")
        self._digests_of_exports: dict[str, str] = {}

    def inspect(self, is_finished: bool = False) -> Verdict:
        verdict = super().inspect(is_finished)
        for name, known in list(self._digests_of_exports.items()):
            verdict.num_states += 1
            if (found := digest(self._exports / name)) != known:
                what = "differs" if found else "is gone"
                verdict.losses.append(f"the export {name}, which the command had written, {what}")
                del self._digests_of_exports[name]
        return verdict

    def _take_in(self, line: dict[str, Any], verdict: Verdict) -> None:
        if line["what"] == "exported":
            self._digests_of_exports[line["name"]] = line["digest"]
        elif line["what"] == "removed":
            self._digests_of_exports.pop(line["name"], None)
        else:
            super()._take_in(line, verdict)
