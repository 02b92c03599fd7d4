"""Sizes, times and counts, as users type them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchax_ckpt.cli.exit_codes import UsageError
from torchax_ckpt.cli.quantities import parsed_count, parsed_secs, parsed_size


@pytest.mark.parametrize(
    ("parsed", "texts"),
    [
        (parsed_size, {"5GB": 5 * 10**9, "1.5 MiB": 3 << 19, "600": 600, "2k": 2000}),
        (parsed_secs, {"90": 90, "1.5 min": 90, "200ms": 0.2, "12h": 43_200, "365d": 31_536_000}),
        (parsed_count, {"70B": 70 * 10**9, "124e6": 124 * 10**6, "1_000": 1000, "1.5k": 1500}),
    ],
)
def test_quantities_are_read(parsed: Callable[[str, str], float], texts: dict[str, float]) -> None:
    assert {text: parsed(text, "--option") for text in texts} == texts


@pytest.mark.parametrize(
    ("parsed", "texts"),
    [
        (parsed_size, ["", "GB", "-1", "0", "0.1", "5XB", "nan"]),
        (parsed_secs, ["", "soon", "-1", "5 weeks", "1e400"]),
        (parsed_count, ["", "many", "_", "1e400"]),
    ],
)
def test_what_is_no_quantity_is_refused(
    parsed: Callable[[str, str], float], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(UsageError, match="^plan: --option: expected a "):
            parsed(text, "plan: --option")
