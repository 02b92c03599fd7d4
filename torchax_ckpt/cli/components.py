"""Summaries of a step's components for people: what each holds, and what differs between two."""

from __future__ import annotations

import collections
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchax_ckpt.cli import output
from torchax_ckpt.layout import names
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.stored.compare import Difference, plain_values
from torchax_ckpt.stored.stored_step import StoredStep

_RANDOM = "rng"
_GROUPS = "param_groups"
_MAX_VALUES = 40  # of a component, in its line
_MAX_LISTED = 8  # of a list, one row each
_GENERATOR = re.compile(rf"((?:{names.PROCESSES}/\d+/)?{_RANDOM}/[^/]+).*")


def lines(stored: StoredStep) -> list[tuple[str, str, str]]:
    """Returns name, leaves and plain values of each component, object and parameter group."""
    document = stored.manifest.document
    leaves: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], dict[str, Any]] = {}
    for leaf in stored.leaves.values():
        leaves.setdefault(_part(document, names.split(leaf.name)), []).append(leaf.nbytes)
    for path, value in plain_values(stored).items():
        part = _part(document, path)
        if len(path) > len(part):
            values.setdefault(part, {})["/".join(path[len(part) :])] = value
    order = {component: number for number, component in enumerate(document)}
    result = []
    for part in sorted({*leaves, *values}, key=lambda part: (order.get(part[0], -1), part)):
        sizes, number = leaves.get(part, []), ""
        if sizes:
            number = f"{counted(len(sizes), 'leaf', 'leaves')}, {output.size(sum(sizes))}"
        is_random = part[0] in (_RANDOM, names.PROCESSES)
        text = _values_text(values.get(part, {}), is_random=is_random)
        result.append(("/".join(part), number, text))
    return result


def _part(document: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the beginning of a path that names the component or object with a line of its own."""
    node = document.get(path[0])
    is_group = isinstance(node, Mapping) and node.get("group") is True
    length = 2 if is_group or path[0] == _RANDOM else 1
    if path[length : length + 1] == (_GROUPS,):
        length += 2
    return path[:length]


def _values_text(values: Mapping[str, Any], *, is_random: bool) -> str:
    if is_random:
        return counted(len(values), "value") if values else ""
    joined: dict[str, Any] = {}
    for name, value in values.items():
        above, _, last = name.rpartition("/")
        if last.isdecimal():
            joined.setdefault(above, []).append(value)
        elif value is not None:
            joined[name] = value
    texts = [f"{name}={reprlib.repr(value)}" for name, value in joined.items()]
    more = f" and {len(texts) - _MAX_VALUES} more" if len(texts) > _MAX_VALUES else ""
    return " ".join(texts[:_MAX_VALUES]) + more


def rows(
    found: Iterable[Difference], described: Callable[[Difference], tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """Returns a row for each difference; one for each generator, and for each long list."""
    lists: dict[str, list[Difference]] = {}
    for difference in found:
        above, _, last = difference.name.rpartition("/")
        is_random = _GENERATOR.fullmatch(difference.name)
        is_item = difference.num_elements is None and last.isdecimal()
        name = is_random[1] if is_random else f"{above}/*" if is_item else difference.name
        lists.setdefault(name, []).append(difference)
    result = []
    for name, members in lists.items():
        if _GENERATOR.fullmatch(name):
            result.append((name, "content", "another random state"))
        elif len(members) > _MAX_LISTED:
            result.append((name, described(members[0])[0], f"{len(members)} values"))
        else:
            result += [(member.name, *described(member)) for member in members]
    return result


def counts(found: Iterable[Difference]) -> str:
    """Returns how many leaves and values of each component differ."""
    components = (names.component_and_rest(difference.name)[0] for difference in found)
    numbers = collections.Counter(components).items()
    return "differences: " + ", ".join(f"{number} in {name}" for name, number in numbers)
