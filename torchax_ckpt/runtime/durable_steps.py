"""The functions that a save calls as soon as its step is durable."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[], None]] = []
"""Called on the thread of the save. They neither wait nor raise."""
