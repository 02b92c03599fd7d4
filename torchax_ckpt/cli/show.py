"""The commands that inspect steps: ``ls``, ``show``, ``verify`` and ``diff``."""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import reprlib
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import rich.live
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import FOUND, OK, UNAVAILABLE, UsageError, code_of
from torchax_ckpt.cli.step_arguments import (
    Directory,
    Json,
    RunOrStep,
    Step,
    chosen,
    existing,
    step_named,
)
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from torchax_ckpt.layout import names
from torchax_ckpt.policies import preservation_rules
from torchax_ckpt.policies.preservation import with_newest
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.storage.directory import commit_record, lease, run_identity, shared_files
from torchax_ckpt.storage.directory.committed_step import (
    ASSETS,
    VERIFIED,
    CommittedStep,
    time_since,
)
from torchax_ckpt.storage.directory.lease import LeaseHolder
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.shared_files import Usage
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.stored.compare import Difference, compare, plain_values
from torchax_ckpt.stored.named_steps import step_infos
from torchax_ckpt.stored.stored_step import StoredStep
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import latest_mirrored, latest_start

_MAX_NAMES = 5  # in a line
_MAX_TEXT = 100  # characters of a value that differs
_WATCH_SECS = 2.0

Filter = Annotated[
    str,
    typer.Option(
        "--filter",
        metavar="GLOB",
        help="Only leaves whose name matches: 'model/*.weight'.",
        show_default=False,
    ),
]
_ALL = "*"


def list_steps(
    directory: Directory,
    watch: Annotated[
        bool, typer.Option("--watch", help="List them again and again until Ctrl-C, at a terminal.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Lists each step's age, size, metrics, the rules that keep it, and whether it is verified.

    The last line names the program that writes to the directory, if there is one.
    """
    run = existing(directory)
    if as_json:
        steps, total_bytes = steps_of(run)
        aside = run.abandoned()
        usage, mirrored = Usage(aside), latest_mirrored(run.path)
        content = {
            "directory": str(run.path),
            "size_bytes": total_bytes,
            "steps": steps,
            "abandoned": {s.path.name: usage.num_bytes(s) for s in aside},
            "runs": {} if steps else _runs_in(run),
            "mirrored": mirrored.values["mirrored_step"] if mirrored else None,
            "writer": _as_json(writer_of(run)),
        }
        output.print_json(content)
        return OK
    console = output.console()
    if not (watch and output.is_watched()):
        console.print(_listing(run))
        return OK
    secs = max(_WATCH_SECS, medium.of(run.path).pause_secs)
    with (
        contextlib.suppress(KeyboardInterrupt),
        rich.live.Live(_listing(run, console.height), console=console, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(secs)
            try:
                listing = _listing(run, console.height)
            except Exception as error:  # bucket clients raise errors of their own
                listing = _line(f"{run.path}: cannot be read now: {error!s:.300}")
            live.update(listing, refresh=True)
    return OK


def _listing(run: RunDirectory, height: int | None = None) -> RenderableType:
    """Returns what ``ls`` prints; only as many of the newest steps as fit into ``height`` lines."""
    steps, total_bytes = steps_of(run)
    rows = [
        (
            step["step"],
            output.age(step["committed"]),
            output.size(step["size_bytes"]),
            output.size(step["shared_bytes"]),
            "yes" if step["verified"] else "no",
            "?" if step["kept_by"] is None else ", ".join(step["kept_by"]),
            " ".join(f"{k}={output.number(v)}" for k, v in step["metrics"].items()),
        )
        for step in steps
    ]
    if height is not None:
        rows = rows[-max(1, height - 5) :]  # besides: the heading, three lines, the cursor's line
    columns = ("step", "age", "size", "shared", "verified", "kept by", "metrics")
    table = output.table(columns, rows, right=("step", "age", "size", "shared"))
    for column in table.columns:
        column.no_wrap = column.no_wrap or height is not None  # a row is a line
    parts: list[RenderableType] = [table]
    if not steps:
        parts = [_line(f"{run.path}: there are no checkpoints")]
        if runs := _runs_in(run):
            listed = ", ".join(f"{name} (newest step {step})" for name, step in runs.items())
            parts.append(_line(f"the runs in this folder: {listed}"))
    if any(step["shared_bytes"] for step in steps):
        text = f"{len(steps)} steps, {output.size(total_bytes)}; shared bytes count once"
        parts.append(_line(f"{text} (cp -r copies them for each step, cp -a does not)"))
    if aside := run.abandoned():
        held = output.size(Usage(aside).freed_bytes(aside))
        folders = ", ".join(committed.path.name for committed in aside[-_MAX_NAMES:])
        text = f"{counted(len(aside), 'abandoned step')}, {held}: {folders}"
        parts.append(_line(f"{text}; see torchax-ckpt prune {run.path} --abandoned"))
    if mirrored := latest_mirrored(run.path):
        step = mirrored.values["mirrored_step"]
        parts.append(_line(f"newest step in the mirror: {step}, {_age_of(mirrored)} old"))
    if (writer := writer_of(run)) is not None:
        holder, is_running = writer
        text = "a program writes here" if is_running else "the last program did not close the run"
        parts.append(_line(f"{text}: {holder.describe(time.time())}"))
    return Group(*parts)


def _age_of(mirrored: Event) -> str:
    """Returns the time since the step that an event names was committed, as text."""
    age_secs = mirrored.values.get("mirrored_age_secs", 0.0)
    return time_since(mirrored.time_secs - age_secs)


def _runs_in(run: RunDirectory) -> dict[str, int]:
    """Returns name -> newest step of the runs in a folder, which need not be a run itself."""
    runs = {}
    for child in run.path.iterdir() if run.path.exists() else ():
        with contextlib.suppress(OSError):  # a folder of somebody else, a stale mount
            if (step := commit_record.newest_in(child)) is not None:
                runs[child.name] = step
    return dict(sorted(runs.items()))


def _line(text: str) -> Text:
    return Text(output.plain(text))


def writer_of(run: RunDirectory) -> tuple[LeaseHolder, bool] | None:
    """Returns the program that holds the lease of a run, and whether it runs; None if none does."""
    with contextlib.suppress(OSError):
        with contextlib.closing(medium.of(run.path).record(run.path / lease.NAME)) as record:
            seen, place = record.read(), record.place()
        holder = LeaseHolder.of(seen.content) if seen is not None else None
        if holder is not None and not holder.is_of_copy(place):
            is_alive = holder.is_alive()
            # A program on another host counts as running until its lease expires.
            is_fresh = time.time() - holder.renewed_secs < lease.LEASE_SECS
            return holder, is_fresh if is_alive is None else is_alive
    return None


def _as_json(writer: tuple[LeaseHolder, bool] | None) -> dict[str, Any] | None:
    if writer is None:
        return None
    holder, is_running = writer
    renewed = output.moment(int(holder.renewed_secs * 1e9))
    return {"host": holder.host, "pid": holder.pid, "renewed": renewed, "running": is_running}


def steps_of(run: RunDirectory) -> tuple[list[dict[str, Any]], int]:
    """Describes each step of a run, oldest first, as JSON; also returns the bytes of all steps."""
    steps = run.steps()
    kept_by = _kept_by(run, steps)
    usage = Usage(steps)
    in_json = [
        {
            "step": committed.step,
            "committed": output.committed_at(committed),
            "size_bytes": usage.num_bytes(committed),
            "shared_bytes": usage.shared_bytes(committed),
            "metrics": run.metrics(committed),
            "verified": committed in run.verified,
            "kept_by": None if kept_by is None else kept_by[index],
        }
        for index, committed in enumerate(steps)
    ]
    return in_json, usage.total_bytes


def _kept_by(run: RunDirectory, steps: Sequence[CommittedStep]) -> list[list[str]] | None:
    """Returns for each step the rules of the newest program that keep it; None if unknown."""
    started = latest_start(run.path)
    if started is None or "keeps" not in started.values or not steps:
        return None
    infos = step_infos(steps, lambda committed: run)
    damaged = [run.verified.is_damaged(committed) for committed in steps]
    kept: list[tuple[str, Sequence[bool]]] = []
    for rule in started.values["keeps"]:
        text = preservation_rules.rule_text(rule)
        are_kept = preservation_rules.kept_by(rule, infos, damaged)
        # Only its own program can evaluate a custom policy.
        kept.append((f"{text}?", [True] * len(steps)) if are_kept is None else (text, are_kept))
    none = [False] * len(steps)
    kept.append((preservation_rules.NEWEST, with_newest(none, damaged)))
    if not run_identity.names(run.path, is_local=True):
        kept.append((preservation_rules.VERIFIED, run.verified.sparing_newest(none, steps)))
    return [[text for text, are_kept in kept if are_kept[index]] for index in range(len(steps))]


def show(
    directory: RunOrStep, step: Step = None, pattern: Filter = _ALL, as_json: Json = False
) -> int:
    """Lists a step's leaves: dtype, shape, size, sharding at the save, and the stack, if any."""
    run, committed = chosen(directory, step)
    stored = StoredStep(committed)
    values = plain_values(stored)
    wanted = _matching("show", pattern, {*stored.leaves, *values})
    leaves = [leaf for name, leaf in stored.leaves.items() if name in wanted]
    values = {name: value for name, value in values.items() if name in wanted}
    total = sum(leaf.nbytes for leaf in leaves)
    if as_json:
        output.print_json(
            {
                "directory": str(run.path),
                "step": committed.step,
                "committed": output.committed_at(committed),
                "verified": committed in run.verified,
                "metrics": run.metrics(committed),
                "versions": dict(stored.manifest.versions),
                "values": values,
                "num_leaves": len(leaves),
                "num_bytes": total,
                "leaves": [
                    {
                        "name": leaf.name,
                        "kind": leaf.kind,
                        "dtype": leaf.dtype,
                        "shape": list(leaf.shape),
                        "num_bytes": leaf.nbytes,
                        "stack": leaf.stack,
                        "sharding": stored.shardings.get(leaf.name),
                    }
                    for leaf in leaves
                ],
            }
        )
        return OK
    rows, texts = [], {}
    for leaf in leaves:
        shape, size = list(leaf.shape), output.size(leaf.nbytes)
        sharding = stored.shardings.get(leaf.name, "host" if leaf.kind in _HOST_KINDS else "")
        rows.append((leaf.name, leaf.dtype, shape, size, sharding, leaf.stack))
        parts = (f"{leaf.dtype}{shape}", size, sharding, leaf.stack and f"in {leaf.stack}")
        texts[leaf.name] = "  ".join(part for part in parts if part)
    if output.is_watched():
        output.console().print(output.tree(texts))
    elif rows:  # pipes and files get one line for each leaf, with its whole name
        columns = ("name", "dtype", "shape", "size", "sharding", "stack")
        output.console().print(output.table(columns, rows, right=("size",)))
    values_of: dict[str, list[str]] = {
        names.component_and_rest(leaf.name)[0]: [] for leaf in leaves
    }
    for name, value in values.items():
        component, rest = names.component_and_rest(name)
        values_of.setdefault(component, []).append(f"{rest}={reprlib.repr(value)}")
    # A filter leaves out the components in which it matches no value.
    lines = [(n, " ".join(texts)) for n, texts in values_of.items() if texts or pattern == _ALL]
    if lines:
        output.console().print(output.table(("component", "values"), lines))
    shown = "" if pattern == _ALL else f"{len(leaves)} of "
    number = counted(len(stored.leaves), "leaf", "leaves")
    output.print_line(f"step {committed.step}: {shown}{number}, {output.size(total)}")
    return OK


def _matching(command: str, pattern: str, known: Collection[str]) -> set[str]:
    """Returns the names that match a pattern; raises UsageError if the pattern matches none."""
    matching = {name for name in known if fnmatch.fnmatchcase(name, pattern)}
    if not matching and pattern != _ALL:
        raise UsageError(
            f"{command}: --filter: expected a pattern that matches a leaf or a value, found "
            f"{pattern!r:.100}, which matches none of the {len(known)} names"
        )
    return matching


_HOST_KINDS = frozenset({"torch", "numpy", "numpy_scalar"})


def verify(
    directory: RunOrStep,
    step: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STEP]...", help="Numbers, latest, best:loss; default: latest."),
    ] = None,
    verify_all: Annotated[bool, typer.Option("--all", help="Verify every step.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Do not mark intact steps as verified.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Reads whole steps and compares every byte with the digests of the save.

    Marks an intact step as verified, unless --read-only is given. No preservation rule deletes the
    newest step that is marked.
    """
    if verify_all and step:
        raise UsageError("verify: expected steps or --all, not both; omit one of them")
    if verify_all:
        run = existing(directory, read_only=read_only)
        steps = run.candidates(None)
    elif step:
        run = existing(directory, read_only=read_only)
        steps = [*dict.fromkeys(step_named(run, text) for text in step)]
    else:
        run, committed = chosen(directory, read_only=read_only)
        steps = [committed]
    results: list[dict[str, Any]] = []
    codes: set[int] = set()
    for committed in steps:
        try:
            result, code = _verify_one(run, committed, read_only=read_only)
        except StepNotFoundError as error:  # the training deleted the step after it was listed
            if not verify_all:
                raise
            output.note(str(error))
            continue
        results.append(result)
        codes.add(code)
        if not as_json and result["ok"]:
            size = output.size(result["num_bytes"])
            output.print_line(f"step {committed.step}: {size}, intact")
        elif not as_json:
            output.note(result["error"])
    if as_json:
        output.print_json({"directory": str(run.path), "steps": results})
    # If one step is damaged and another could not be read, damage decides the exit code: the
    # command looks for damage, and a step that could not be read may be intact.
    return next((code for code in (FOUND, UNAVAILABLE) if code in codes), max(codes, default=OK))


def _verify_one(
    run: RunDirectory, committed: CommittedStep, *, read_only: bool
) -> tuple[dict[str, Any], int]:
    """Compares a step's bytes with the digests of the save; returns the result and exit code."""
    try:
        # One host's part of a step has digests too, so it can be verified.
        stored = StoredStep(committed, allow_part=True)
        with progress.bar(f"step {committed.step}", lambda: stored.stored_bytes) as on_bytes:
            stored.verify(on_bytes=on_bytes)
    except StepNotFoundError:
        raise
    except CheckpointError as error:
        sharing = []
        if isinstance(error, CorruptCheckpointError):
            others = run.branches().committed  # run.steps() may be this step alone
            sharing = shared_files.damaged_too(error, committed, others)
            for damaged in (committed, *sharing):
                run.verified.note(damaged, is_sound=False)
            if not read_only:
                run.verified.mark((committed, *sharing))
        result = {
            "step": committed.step,
            "ok": False,
            "error": " ".join(shared_files.naming(str(error), sharing).split()),
            "leaf": error.key_path,
            "damaged_too": [damaged.step for damaged in sharing],
        }
        return result, code_of(error)
    if not (read_only or committed in run.verified):
        run.verified.note(committed, is_sound=True)
        run.verified.mark([committed])
    is_marked = (committed.path / VERIFIED).exists()
    if not (is_marked or read_only):
        output.note(f"step {committed.step} is intact, but cannot be marked as verified")
    num_bytes = stored.stored_bytes
    return {"step": committed.step, "ok": True, "num_bytes": num_bytes, "marked": is_marked}, OK


_IN_WORDS = {
    "only_in_a": "only in A",
    "only_in_b": "only in B",
    "form": "kind, dtype or shape",
    "bits": "equal values, other bits",
    "content": "content",
}


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A step, DIRECTORY/STEP; or a directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The step or directory to compare with A.")],
    pattern: Filter = _ALL,
    as_json: Json = False,
) -> int:
    """Compares every bit of two steps; if A or B is a run's directory, takes its newest step.

    Lists leaves (arrays) and plain values (hyperparameters, counters) that only one step has, plain
    values that differ, leaves that differ in kind, dtype or shape, and, for leaves with different
    elements, how many elements differ and by how much at most. Two NaNs are equal. Leaves that
    differ only in the bits of equal values (NaN payloads, signs of zero) are listed too.
    """
    left, right = (StoredStep(chosen(text)[1]) for text in (a, b))
    known: set[str] = set()
    for stored in (left, right) if pattern != _ALL else ():
        assets = (f"{ASSETS}/{name}" for name in stored.read_assets())
        known.update(stored.leaves, plain_values(stored), assets)
    _matching("diff", pattern, known)
    with progress.bar("comparing", lambda: left.stored_bytes) as on_bytes:
        result = compare(
            left,
            right,
            is_wanted=lambda name: fnmatch.fnmatchcase(name, pattern),
            on_bytes=on_bytes,
        )
    if as_json:
        output.print_json(
            {
                "a": {"path": str(left.committed.path), "step": left.committed.step},
                "b": {"path": str(right.committed.path), "step": right.committed.step},
                "identical": result.is_identical,
                "num_identical": result.num_identical,
                "leaves": [*map(vars, result.leaves)],
                "values": [*map(vars, result.values)],
            }
        )
    elif result.is_identical:
        number = counted(result.num_identical, "leaf", "leaves")
        output.print_line(f"identical to the bit: {number}, and all values")
    else:
        differences = (*result.leaves, *result.values)
        rows = [(d.name, _IN_WORDS[d.what], _difference_detail(d)) for d in differences]
        output.console().print(output.table(("name", "difference", ""), rows))
        counts = collections.Counter(names.component_and_rest(d.name)[0] for d in differences)
        listed = ", ".join(f"{number} in {name}" for name, number in counts.items())
        output.print_line(f"differences: {listed}")
        output.print_line(
            f"{counted(result.num_identical, 'leaf is', 'leaves are')} identical to the bit; "
            f"{counted(len(result.leaves), 'leaf', 'leaves')} and "
            f"{counted(len(result.values), 'value')} differ"
        )
    return OK if result.is_identical else FOUND


def _difference_detail(difference: Difference) -> str:
    if difference.what == "bits":
        return ""
    if difference.num_elements is None:
        texts = [text for text in (difference.a, difference.b) if text is not None]
        return " -> ".join(f"{t[:_MAX_TEXT]}{'...' * (len(t) > _MAX_TEXT)}" for t in texts)
    parts = [counted(difference.num_elements, "element")]
    if difference.max_abs is not None:
        parts.append(f"by at most {difference.max_abs:.6g}")
    if difference.num_nan:
        parts.append(f"{difference.num_nan} NaN on one side")
    return ", ".join(parts)
