"""Fixtures of the tests of compiled programs; see ``pytest_plugins`` there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchax_ckpt.compilation import packed_programs
from torchax_ckpt.runtime import durable_steps


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_programs, "_SETTLE_SECS", 0.01)


@pytest.fixture
def listening() -> Iterator[None]:
    """Ends the listening that a test begins."""
    before = [*durable_steps.listeners]
    yield
    durable_steps.listeners[:] = before
