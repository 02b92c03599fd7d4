"""The differences between a checkpoint and a program's objects, as an error or as a report."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from torchax_ckpt.errors import CheckpointError, MismatchError
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.options import TierName

Call = Literal["restore", "warm_start", "load", "dcp.load", "torch.restore"]
"""The call that compared; an error names the arguments of this call that help."""

_OURS: Mapping[Call, tuple[str, str]] = {
    "restore": ("attached", "the attached objects"),
    "warm_start": ("in the model", "the model"),
    "load": ("in abstract_state", "abstract_state"),
    "dcp.load": ("in the state dict", "the state dict"),
    "torch.restore": ("in the program", "the program's objects"),
}
_MAX_LISTED = 20
_FEW = 3  # more names of one pattern than this are one entry
_MODEL, _OPTIMIZER = "model/", "optimizer/"
_NUMBER = re.compile(r"(?<![^./])[0-9]+(?![^./])")  # a whole part of a name, such as a layer's


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The result of a restore.

    Attributes:
      step: the restored step; None for weights from files.
      missing: names that are attached but not in the checkpoint; what they name stays unchanged.
      unexpected: names in the checkpoint that no attached object takes.
      mismatched: name of a leaf that differs -> "expected ..., found ..."; the attached leaf stays
        unchanged. Optimizer state is listed under the name of its parameter, for example
        ``optimizer/head.weight``. A scheduler is listed if it is of another class than the stored
        one; it has taken the state if it has all of the state's keys.
      left_out: names of the model's tensors, in the program or the checkpoint, that ``include`` and
        ``exclude`` do not select; and names of the checkpoint's optimizer state for these tensors,
        or for parameters that were in no group of the optimizer.
      skipped_steps: steps newer than ``step`` that could not be read.
      is_verified: whether every stored byte of the step was read and compared with its digest.
      tier: the tier from which the step was read, "durable" or "local".
    """

    step: int | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    skipped_steps: tuple[int, ...] = ()
    is_verified: bool = False
    tier: TierName = "durable"


@dataclasses.dataclass
class Findings:
    """Differences between a checkpoint and the attached objects, by name; truthy if any."""

    missing: list[str] = dataclasses.field(default_factory=list)  # attached only
    unexpected: list[str] = dataclasses.field(default_factory=list)  # only in the checkpoint
    # name of a leaf -> "expected ..., found ..."
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)
    # optimizer state whose parameter is not selected, or was in no group: no difference
    left_out: list[str] = dataclasses.field(default_factory=list)
    has_other_optimizer: bool = False
    has_other_scheduler: bool = False
    # modules and optimizers that a step with functional state lacks, which perhaps replaced them
    unrestored: list[str] = dataclasses.field(default_factory=list)
    unattached: list[str] = dataclasses.field(default_factory=list)  # components of the step
    state: Node = None  # that of the functional state
    lacks_ties: bool = False  # the checkpoint ties weights that are separate in the model

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def mismatch(self, name: str, expected: object, found: object) -> None:
        """Records that, for ``name``, the program has ``expected`` and the checkpoint ``found``."""
        self.mismatched[name] = f"expected {expected}, found {found}"

    def report(
        self, step: int | None, left_out: Iterable[str], *, is_verified: bool
    ) -> RestoreReport:
        """Returns the report of a restore that was made in spite of the differences."""
        return RestoreReport(
            step,
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            mismatched=dict(self.mismatched),
            left_out=tuple(left_out),
            is_verified=is_verified,
        )

    def error(self, step: int | None, path: str, call: Call = "restore") -> MismatchError:
        """Returns one error that lists all differences, and says what to do; no step for files."""
        source = path if step is None else f"The checkpoint at step {step} in {path}"
        kind = "files" if step is None else "checkpoint"
        ours, whole = _OURS[call]
        lines = [f"{source} does not fit {whole}; nothing was changed."]
        for title, found in (
            (f"missing from the {kind}", self.missing),
            (f"in the {kind}, but not {ours}", self.unexpected),
            (f"different (expected: {ours}, found: in the {kind})", self.mismatched),
        ):
            lines += _section(title, found, self.mismatched if found is self.mismatched else {})
        lines.append(self._remedy(call, step, path))
        return MismatchError(
            "\n".join(lines),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
            step=step,
            path=path,
        )

    def functional(self, reader: str) -> str:
        """Returns a sentence about a step with functional state; ``reader`` returns that state."""
        state = decode(self.state, lambda leaf: None)
        keys = [f"{key!s:.80}" for key in state][:_MAX_LISTED] if isinstance(state, dict) else []
        held = f" ({', '.join(keys)})" if keys else ""
        return (
            f"The step holds what save(state=) was given{held}, in place of modules and "
            f"optimizers: {reader} returns it."
        )

    def _remedy(self, call: Call, step: int | None, path: str) -> str:
        """Returns what helps: the one thing if the cause is plain, else the choices of the call."""
        components = {name.partition("/")[0] for name in self.missing}
        if self.state is not None and components & {"model", "optimizer"}:
            if call == "torch.restore":
                return self.functional("dcp.load with torchax_ckpt.torch.StorageReader")
            return (
                f"{self.functional(f'load({step}, abstract_state)')} Leave modules and optimizers "
                "out of attach; or call attach(resume=False), and put into them what load returns."
            )
        if call == "load":
            return "Give an abstract_state that fits; with None, load returns everything as saved."
        if call == "dcp.load":
            return (
                "Leave out of the state dict what the step lacks, or pass "
                "LoadPlanner(allow_partial_load=True). If all names differ by their beginning, "
                "pass StorageReader(prefix=...)."
            )
        if call == "torch.restore":
            return (
                "Give objects as those that the run trained; objects that are left out of the call "
                "are not compared. With strict=False, what matches is restored."
            )
        if self.lacks_ties:
            return (
                "The weights were tied when they were saved. model.to('jax') unties weights: call "
                "model.tie_weights() after it, or tie them as the model's constructor does, and "
                "build the optimizer after that."
            )
        if (rename := self._rename()) is not None:
            first = "call attach(resume=False), then restore" if call == "restore" else call
            return f"The model's names differ by a prefix: {first}(rename={rename})."
        others = {name.partition("/")[0] for name in self.unexpected}.difference(self.unattached)
        if (
            self.unattached
            and call == "restore"
            and not (self.missing or self.mismatched or others)
        ):
            return (
                f"The call of attach leaves out what the run trains too: "
                f"{', '.join(self.unattached)}. Attach all of it to go on training. To read only "
                f"the weights, call torchax_ckpt.warm_start(model, {path!r}), or, for the values, "
                f"torchax_ckpt.load({path!r}, filter='model/*')."
            )
        if self.has_other_optimizer:
            return (
                "Attach an optimizer of the stored class. To go on with one of another class and "
                "without the stored state, call attach(resume=False), then restore(strict=False)."
            )
        if self.has_other_scheduler:
            return (
                "Attach a scheduler of the stored class. To go on with one of another class, call "
                "attach(resume=False), then restore(strict=False): a scheduler that has all keys "
                "of the stored state takes it, as one that was renamed does; others begin anew."
            )
        if call == "warm_start":
            return (
                "Rename or leave out the tensors that differ (rename=, exclude=); or convert "
                "floating-point dtypes (cast=True); or take only the tensors that match "
                "(strict=False)."
            )
        return (
            "Attach the same objects as the program that wrote it, or use another directory. If "
            "the program has changed on purpose, call attach(resume=False), then restore: with "
            "strict=False it restores the leaves that match; rename= and exclude= rename or leave "
            "out leaves."
        )

    def _rename(self) -> str | None:
        """Returns the ``rename`` that makes all names of the model fit; None if no prefix does."""
        live, stored = (
            [n.removeprefix(_MODEL) for n in names if n.startswith(_MODEL)]
            for names in (self.missing, self.unexpected)
        )
        if not live or not stored or any("/" in name for name in (*live, *stored)):
            return None
        for ours, theirs, rename in (
            (live, stored, "{{'{}*': '*'}}"),
            (stored, live, "{{'*': '{}*'}}"),
        ):
            for name in theirs:
                prefix = name.removesuffix(ours[0])
                if prefix.endswith(".") and {prefix + n for n in ours} == set(theirs):
                    return rename.format(prefix)
        return None


@contextlib.contextmanager
def refused(where: str) -> Iterator[None]:
    """Turns an error of user code, in a block that gives it stored state, into MismatchError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = f"refused the stored state: {type(error).__name__}: {error}"
        raise MismatchError(f"{where}: {why}", mismatched={where: why}) from error


def type_name(value: object) -> str:
    """Returns the type of an object for messages; the ``repr`` of a model would take pages."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {module}{kind.__qualname__}"


def _section(title: str, found: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Returns lines that list names; a parameter and its optimizer state are one entry."""
    known = dict.fromkeys(found)
    owner_of = {
        name: owner
        for name in known
        if name.startswith(_OPTIMIZER)
        # The name of one of several optimizers precedes the parameter's name.
        for _, *rest in [name.split("/")]
        for owner in (_MODEL + "/".join(rest), _MODEL + "/".join(rest[1:]))
        if owner in known
    }
    owners = set(owner_of.values())
    groups: dict[tuple[str, bool, str], list[str]] = {}
    for name in (n for n in known if n not in owner_of):
        text = f": {texts[name]}" if name in texts else ""
        key = (_NUMBER.sub("*", name), name in owners, text)
        groups.setdefault(key, []).append(name)
    entries = []
    for (pattern, has_state, text), members in groups.items():
        is_one = len(members) <= _FEW
        state = f" and {'its' if is_one else 'their'} optimizer state" * has_state
        listed = members if is_one else [f"{pattern} ({len(members)} of this pattern)"]
        entries += [f"    {name}{state}{text}" for name in listed]
    if len(entries) > _MAX_LISTED:
        entries[_MAX_LISTED:] = [f"    ... and {len(entries) - _MAX_LISTED} more"]
    return [f"  {title}:", *entries] if entries else []
