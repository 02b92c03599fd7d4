"""Prints the results of commands, as tables and trees for people or as JSON for programs."""

from __future__ import annotations

import calendar
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from torchax_ckpt.storage.directory.committed_step import CommittedStep, time_since

# Width of a table that goes to a pipe or a file, so that nothing is cut to a terminal's width.
_UNBOUNDED = 1_000_000
_DAY = 86_400
_ROUND_SECS = (15, 30, *(60 * n for n in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)), _DAY)


def is_watched() -> bool:
    """Returns whether standard output is a terminal, and not a pipe or a file."""
    return sys.stdout.isatty()


def console() -> Console:
    """Returns a rich console, which prints tables, trees and lines on standard output."""
    # For a pipe, rich would take a width from environment variables, and break lines at it.
    return Console(width=None if is_watched() else _UNBOUNDED, highlight=False)


def print_json(content: Any, indent: int | None = 2) -> None:
    """Prints ``content`` on stdout as JSON; NaN and infinity as strings, as steps store them."""
    plain_content = json.loads(json.dumps(content), parse_constant=str)
    print(json.dumps(plain_content, indent=indent, allow_nan=False), flush=True)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()
) -> Table:
    """Returns a table for rich; columns in ``right`` are aligned right and never wrapped."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_right = column in right
        result.add_column(column, justify="right" if is_right else "left", no_wrap=is_right)
    for row in rows:
        # Names in a checkpoint are untrusted, so no markup or control character may take effect.
        result.add_row(*(Text(plain(cell)) for cell in row))
    return result


def tree(texts: Mapping[str, str]) -> Tree:
    """Returns a tree for rich: splits names at ``/``, and puts each text after its name."""
    root = Tree("", hide_root=True)
    nodes: dict[str, tuple[Tree, Text]] = {}
    for name, text in texts.items():
        path, above = "", root
        for part in name.split("/"):
            path += f"/{part}"
            if path not in nodes:
                label = Text(plain(part))
                nodes[path] = above.add(label), label
            above, label = nodes[path]
        label.append(f"  {plain(text)}", style="dim")
    return root


def print_line(text: str) -> None:
    """Prints a line on stdout."""
    console().print(Text(plain(text)))


def note(text: str) -> None:
    """Prints a line on stderr."""
    print("torchax-ckpt: " + plain(text), file=sys.stderr)


def plain(value: Any) -> str:
    """Returns the value as text, and escapes characters that would control a terminal."""
    text = "" if value is None else str(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def size(nbytes: int) -> str:
    """Formats a number of bytes with a unit in powers of ten, for example ``1.5 GB``."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.3g} {unit}"


def duration(secs: float) -> str:
    """Formats a duration, for example ``12 ms``, ``1.5 s``, ``3 min``, ``2.5 h`` or ``4 d``."""
    for limit, unit, unit_secs in (
        (0.9995, "ms", 1e-3),
        (119.5, "s", 1),
        (7170, "min", 60),
        (172_000, "h", 3600),
    ):
        if secs < limit:
            return f"{_short(secs / unit_secs)} {unit}"
    return f"{_short(secs / 86_400)} d"


def _short(amount: float) -> str:
    return f"{amount:.0f}" if amount >= 9.995 else f"{amount:.3g}"


def round_number(least: float) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10, 20) if n * power >= 0.999999 * least)


def round_secs(least: float) -> float:
    """Returns the smallest round number of seconds, minutes, hours or days, at least ``least``."""
    if least <= 10:
        return round_number(least)
    return next((secs for secs in _ROUND_SECS if secs >= least), _DAY * round_number(least / _DAY))


def age(moment: str | None) -> str:
    """Formats the time since a text that ``moment`` returned, such as ``5 min``; ``?`` for None."""
    if moment is None:
        return "?"
    return time_since(calendar.timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ")))


def moment(nsecs: int) -> str:
    """Formats nanoseconds since 1970 as a UTC time in ISO 8601, in whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nsecs // 10**9))


def committed_at(committed: CommittedStep) -> str | None:
    """Returns the time of a step's commit as text; None if the file that states it is damaged."""
    return None if committed.has_lost_record else moment(committed.commit_timestamp_nsecs)


def number(value: Any) -> str:
    """Formats a metric: a float with six significant digits, any other value as JSON."""
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
