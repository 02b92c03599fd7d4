"""Indices of processes as runs, for messages to all processes.

A message to all processes that named each of them would make the bytes of a save grow with the
square of their number. The processes that write an array are all of them, or one replica of them,
and so a few runs of equally distant indices.
"""

from __future__ import annotations

from collections.abc import Sequence

Runs = list[list[int]]
"""Runs of indices, each as [first index, number of indices, distance between two of them]."""


def runs_of(indices: Sequence[int]) -> Runs:
    """Returns ascending indices as runs."""
    runs: Runs = []
    for index in indices:
        if runs:
            first, number, distance = runs[-1]
            if number == 1:
                runs[-1] = [first, 2, index - first]
                continue
            if index == first + number * distance:
                runs[-1][1] += 1
                continue
        runs.append([index, 1, 1])
    return runs


def indices_of(runs: Runs) -> list[int]:
    """Returns the indices that ``runs_of`` described."""
    return [first + i * distance for first, number, distance in runs for i in range(number)]
