"""A user's hook for events, to which the threads that call it hold only a weak reference."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from torchax_ckpt.telemetry.events import Event

_PATIENCE_SECS = 1.0


class Hook:
    """A user's hook, to which only the checkpointer holds a strong reference.

    The hook may be a method of an object that refers to the checkpointer. A thread with a strong
    reference to the hook would therefore keep alive a checkpointer that the program can no longer
    reach.

    Attributes:
      call: the function that threads call.

    Args:
      on_event: the user's function.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.on_event = on_event
        self.call = _Call(self)

    def outlive(self) -> None:
        """Keeps the hook alive for the last events; called by the checkpointer's finalizer."""
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
