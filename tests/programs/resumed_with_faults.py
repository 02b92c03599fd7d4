"""Several processes go on from step 8; then one of them meets faults, which all of them report.

python resumed_with_faults.py INDEX COUNT PORT SETTINGS

SETTINGS are those of ``group.py``, without actions.
"""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

from etils import epath
from group import ckpt, directory, train, training
from processes_program import INDEX, report
from support.damage import flip_bit

from torchax_ckpt import errors
from torchax_ckpt.storage.arrays import block_digests, read_arrays


def told(call: Any, *args: Any) -> list[Any] | None:
    before = training.whole(), training.own()
    try:
        call(*args)
    except errors.CheckpointError as error:
        return [type(error).__name__, str(error), (training.whole(), training.own()) == before]
    return None


assert training.attach(ckpt) == 8
report(whole=training.whole(), own=training.own())
assert ckpt.restore(4).step == 4
train(8, 5)  # goes back: saves another step 8
ckpt.wait_until_finished()

# A disk is full, on process 1.
take = block_digests.take


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


block_digests.take = full if INDEX == 1 else take  # type: ignore[assignment]
training.step()
assert ckpt.save(9, force=True)
failure = told(ckpt.wait_until_finished)
block_digests.take = take
for step in (9, 10):  # tried again, on both; then one more
    assert ckpt.save(step, force=True)
    ckpt.wait_until_finished()
    training.step()
files = sorted(os.listdir(directory))

# User code refuses, on process 1.
load = training.loader.load_state_dict


def refuse(state: Any) -> None:
    load(state)
    if INDEX == 1 and state["position"] == 9:
        raise ValueError("not mine")


training.loader.load_state_dict = refuse  # type: ignore[method-assign]
refused = told(ckpt.restore, 9)
training.loader.load_state_dict = load  # type: ignore[method-assign]

verified = ckpt.verify(9)
ckpt.delete(8)

# In the newest step a byte is damaged that only process 1 reads.
with ckpt._processes.round("damaging"):
    if INDEX == 0:
        stored = epath.Path(directory) / "10" / "state"
        place = read_arrays.place_of_chunk(stored, "model.0.weight", [3, 0])
        assert place
        assert "ocdbt.process_1" in place.file
        flip_bit(pathlib.Path(place.file), place.begin + 40)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    restored = ckpt.restore()
report(
    failure=failure,
    files=files,
    refused=refused,
    verified=verified,
    restored=[restored.step, *restored.skipped_steps],
    is_verified=restored.is_verified,
    warned=[str(w.message) for w in warned],
    steps=ckpt.all_steps(),
    damaged=told(ckpt.verify, 10),
    missing=told(ckpt.restore, 77),
)
training.step()
ckpt.save(11, force=True)
ckpt.close()
report(steps=ckpt.all_steps())
