"""Which leaves of a run's state are frozen, so that its saves reuse the files that hold them.

Either the user names them with patterns, or they are the parameters with ``requires_grad=False``.
Process 0 answers for all processes at the first save after ``attach`` or ``restore``, and again
after a durable save that found one of these parameters changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence

from torchax_ckpt import options
from torchax_ckpt.errors import CheckpointError, SelectionError
from torchax_ckpt.layout import selection
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.reuse import known
from torchax_ckpt.snapshot.stacking import Array

logger = logging.getLogger(__name__)

Parameters = Callable[[], frozenset[str]]
"""Returns the names of the parameters that need no gradients now."""

_ASKING = "asking which leaves are frozen"
_NOTHING_IS_FROZEN = (
    "CheckpointOptions(reuse=True): no leaf of the state is a parameter with requires_grad=False, "
    "so nothing is reused, and every save writes all leaves. Freeze parameters before the first "
    "save, or name the leaves that do not change, as `torchax-ckpt show` prints them: "
    'CheckpointOptions(reuse=["state/params/base"])'
)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The frozen leaves, and whether the identity of some of their arrays proves their values."""

    leaves: frozenset[str] = frozenset()
    has_proofs: bool = False
    is_stale: bool = False  # whether the next durable save asks again


class FrozenLeaves:
    """The frozen leaves of a run; ``processes`` is the channel between its training threads."""

    def __init__(self, option: options.Reuse, processes: Processes) -> None:
        self._option: options.Reuse = option
        self._processes = processes
        self._warn_once = functools.cache(logger.warning)
        self._answer: Frozen | None = None

    def forget(self) -> None:
        """Makes the next save ask."""
        self._answer = None

    def changed(self) -> None:
        """Makes the next durable save ask, because one has found a frozen leaf changed."""
        if isinstance(self._option, bool | str) and self._answer is not None:
            self._answer = dataclasses.replace(self._answer, is_stale=True)

    def of_state(
        self,
        names: Sequence[str],
        arrays: Sequence[Array],
        parameters: Parameters,
        *,
        is_durable: bool,
    ) -> Frozen:
        """Returns the frozen leaves of a captured state that all processes save.

        A save that ``is_durable`` has waited for the one before. Raises SelectionError, on all
        processes, if a pattern of process 0 matches no leaf.
        """
        if self._must_ask(is_durable):
            try:
                leaves = self._ask(lambda: self._found(names, arrays, parameters))
            except CheckpointError as error:
                if isinstance(error, SelectionError):
                    raise
                return Frozen()  # the save will fail for the same reason
            found = (a for n, a in zip(names, arrays, strict=True) if n in leaves)
            self._answer = Frozen(leaves, any(map(known.is_proof, found)))
        return self._answer or Frozen()

    def refuse(self, error: BaseException, *, is_durable: bool) -> None:
        """Takes part for a process that cannot save, so that all or none know the answer."""
        if not self._must_ask(is_durable):
            return
        # Who interrupts a program does not wait for other processes.
        if self._processes.is_first or not isinstance(error, Exception):
            self._processes.refuse(_ASKING, error)
        else:
            with contextlib.suppress(CheckpointError):  # then none knows it
                self._answer = Frozen(self._ask(frozenset), has_proofs=True)

    def _must_ask(self, is_durable: bool) -> bool:
        is_known = self._answer is not None and not (is_durable and self._answer.is_stale)
        return self._option is not False and not is_known

    def _ask(self, find: Parameters) -> frozenset[str]:
        with self._processes.round(_ASKING) as outcome:
            outcome.value = sorted(find()) if self._processes.is_first else None
        return frozenset(outcome.value)

    def _found(
        self, names: Sequence[str], arrays: Sequence[Array], parameters: Parameters
    ) -> frozenset[str]:
        if not isinstance(self._option, bool | str):
            return _matching(self._option, names)
        sizes = {n: a.size * a.dtype.itemsize for n, a in zip(names, arrays, strict=True)}
        found = parameters() & sizes.keys()
        if self._option is True and not found:
            self._warn_once(_NOTHING_IS_FROZEN)
        has_half = 2 * sum(sizes[name] for name in found) >= sum(sizes.values())
        return found if has_half or self._option is True else frozenset()


def _matching(patterns: Iterable[str], names: Sequence[str]) -> frozenset[str]:
    """Returns the leaves that match a pattern, in which a dot may stand for a slash."""
    dotted = {name: name.replace("/", ".") for name in names}
    found, unused = set[str](), []
    for pattern in patterns:
        (compiled,) = selection.compiled("reuse", pattern.replace("/", ".")).values()
        matched = {name for name, text in dotted.items() if compiled.match(text)}
        found |= matched
        unused += [] if matched else [repr(pattern)]
    if unused:
        raise SelectionError(
            f"CheckpointOptions: reuse: nothing in the state matches {', '.join(unused)}. Use the "
            f"names that `torchax-ckpt show` prints, such as {', '.join(names[:3])}. State that "
            "each of several processes has for itself cannot be reused. Nothing was saved."
        )
    return frozenset(found)
