"""Several processes agree on when to save, though none waits for another at every step."""

from __future__ import annotations

import pytest
from support import PROGRAMS
from support.processes import run_processes


@pytest.mark.slow
@pytest.mark.parametrize("paces", ["[0.001, 0.004]", "[0.004, 0.001]"], ids=["second", "first"])
def test_two_processes_save_the_same_steps_though_one_is_slow(paces: str) -> None:
    (first,), (second,) = run_processes(PROGRAMS / "unequal_paces.py", 2, paces, devices=1)
    print(first, second)
    assert first["saves"] == second["saves"]
    assert first["saves"][0] == 1
    # A policy that names steps gets just those, decided ahead or not, each time they come.
    assert first["saves"].count(123) == 1
    assert first["saves"].count(777) == 1
    # Going back from 499 to 200 and longer strides from 700 on neither stop saving nor part them.
    for part in (range(2, 500), range(700, 2500)):
        assert len(set(first["saves"]) & set(part)) > 1
    assert first["saves"] != sorted(set(first["saves"]))
    # 20 us is what it may take; the rest is for a machine that is busy with other things.
    assert max(first["median"], second["median"]) < 10 * 20e-6
    assert first["keys"] < 200  # of the latest, not of all
