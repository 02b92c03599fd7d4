"""Who wants to know at once that a step is durable."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[], None]] = []
"""Called on the thread of a save once its step is durable. They neither wait nor raise."""
