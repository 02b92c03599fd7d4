"""Parses sizes, times and counts with units, as users type them in options."""

from __future__ import annotations

import re

from torchax_ckpt.cli.exit_codes import UsageError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?(ms|s|min|h|d|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([KMBT]?)", re.IGNORECASE)
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parsed_size(text: str, option: str) -> int:
    """Parses a size such as ``5GB``, ``500 MiB`` or a plain number of bytes, at least one byte."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option}: expected a size such as 5GB or 500MiB, found {text!r}")
    number, prefix, binary = match.groups()
    nbytes = int(float(number) * (1024 if binary else 1000) ** _PREFIXES[prefix.upper()])
    if nbytes < 1:
        raise UsageError(f"{option}: expected a size of at least one byte, found {text!r}")
    return nbytes


def parsed_secs(text: str, option: str) -> float:
    """Parses a time such as ``90``, ``5min`` or ``12h`` into seconds."""
    match = _SECS.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{option}: expected a time such as 90, 90s, 5min, 12h or 365d, found {text!r}"
        )
    return float(match[1]) * _UNITS[match[2]]


def parsed_count(text: str, option: str) -> int:
    """Parses a number such as ``70B`` or ``124e6``."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option}: expected a number such as 70B or 124e6, found {text!r}")
    return int(float(match[1].replace("_", "")) * _POWERS[match[2].upper()])
