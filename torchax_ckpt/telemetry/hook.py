"""A user's hook for events, called by threads that must not keep alive what the hook refers to."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from torchax_ckpt.telemetry.events import Event

_PATIENCE_SECS = 1.0


class Hook:
    """A user's hook. The checkpointer has the only strong reference to it.

    The hook may be a method of an object that refers to the checkpointer. A thread that held it
    would keep a checkpointer alive that the program cannot reach any more.

    Attributes:
      call: what threads call.

    Args:
      on_event: the user's function.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.on_event = on_event
        self.call = _Call(self)

    def outlive(self) -> None:
        """Keeps the hook for events still to come; called when the checkpointer is going."""
        self.call.kept = self


class _Call:
    def __init__(self, hook: Hook) -> None:
        self._hook = weakref.ref(hook)
        self.kept: Hook | None = None

    def __call__(self, event: Event) -> None:
        # The garbage collector clears weak references a moment before it calls finalizers.
        deadline = time.monotonic() + _PATIENCE_SECS
        while (hook := self.kept or self._hook()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if hook is not None:
            hook.on_event(event)
