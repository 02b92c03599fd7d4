"""Wraps the user's ``on_event`` function, so that threads hold only a weak reference to it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from torchax_ckpt.telemetry.events import Event

_PATIENCE_SECS = 1.0


class Hook:
    """The user's ``on_event`` function, to which only the checkpointer holds a strong reference.

    ``on_event`` may be a method of an object that refers to the checkpointer. A thread with a
    strong reference to ``on_event`` would then keep the checkpointer alive after the program has
    dropped its own references to the checkpointer.

    Attributes:
      call: the function that threads call.

    Args:
      on_event: the user's function.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.on_event = on_event
        self.call = _Call(self)

    def outlive(self) -> None:
        """Makes ``call`` hold a strong reference to this hook from now on.

        Events that still wait when the checkpointer is garbage-collected then reach the user.
        """
        self.call.kept = self


class _Call:
    def __init__(self, hook: Hook) -> None:
        self._hook = weakref.ref(hook)
        self.kept: Hook | None = None

    def __call__(self, event: Event) -> None:
        # The garbage collector clears weak references shortly before it calls the finalizer, which
        # sets ``kept``. The loop waits for that.
        deadline = time.monotonic() + _PATIENCE_SECS
        while (hook := self.kept or self._hook()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if hook is not None:
            hook.on_event(event)
