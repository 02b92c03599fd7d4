"""Four hosts restore local steps that were moved between them, in every dtype and sharding.

    python moved_local_steps.py INDEX COUNT PORT DIRECTORY RAMDISKS PLACES

PLACES is JSON: lists that say whose local step each host finds; null is none.
"""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
import shutil
import sys
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torchax
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import INDEX, report

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

torchax.enable_globally()
logging.getLogger("torchax_ckpt.restoring.local_tier").setLevel(logging.INFO)
directory, ramdisks, places = sys.argv[4], pathlib.Path(sys.argv[5]), json.loads(sys.argv[6])
# A host is one place of replica and fsdp, and has all of tp.
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "fsdp", "tp"))
random = np.random.default_rng(0)
expected: dict[str, np.ndarray] = {}
shardings: dict[str, NamedSharding] = {}
dtypes = ["float32", "bfloat16", "complex64", "bool", "int8", "int4", "uint32"]
dtypes += ["float8_e4m3fn", "float8_e5m2"]
specs = [P("fsdp"), P("tp", "fsdp"), P(None, "tp"), P(), P(("fsdp", "tp"))]
for dtype, (i, spec) in itertools.product(dtypes, enumerate(specs)):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = random.integers(0, 256, (8, 4 * kind.itemsize), np.uint8)
    # Any bits: zeros with signs, NaNs with payloads.
    array = (raw & 1).astype(kind) if dtype in ("bool", "int4") else raw.view(kind)
    expected[f"{dtype} {i}"], shardings[f"{dtype} {i}"] = array, NamedSharding(mesh, spec)
for name, value in {"scalar": np.float32(-0.0), "empty": np.zeros((0, 4), np.float32)}.items():
    expected[name], shardings[name] = np.asarray(value), NamedSharding(mesh, P())
turned = {
    "float32 0": P(None, ("tp", "fsdp")),
    "uint32 1": P("replica"),
    "bfloat16 1": P("fsdp", "tp"),
    "float8_e4m3fn 0": P(),
    "float8_e5m2 4": P("replica"),
}


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def put(name: str) -> jax.Array:
    array = expected[name]
    return jax.make_array_from_callback(array.shape, shardings[name], lambda at: array[at])


class Place:
    value = f"of {INDEX}"

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def opened(mine: pathlib.Path) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy(()),
        local=LocalTier(mine, save_decision_policy=policies.FixedIntervalPolicy(1)),
    )


with opened(ramdisks / str(INDEX)) as ckpt:
    ckpt.attach(stateful={"place": Place()})
    ckpt.save(1, state={name: put(name) for name in expected})
sync_global_devices("saved")
for number, hosts in enumerate(places):
    mine = ramdisks / f"{number}-{INDEX}"
    if hosts[INDEX] is not None:
        shutil.copytree(ramdisks / str(hosts[INDEX]), mine)
    sync_global_devices(f"moved {number}")
    place = Place()
    place.value = "none"
    with opened(mine) as ckpt:
        wanted = {
            name: jax.ShapeDtypeStruct(
                array.shape,
                array.dtype,
                sharding=NamedSharding(mesh, turned[name]) if name in turned else shardings[name],
            )
            for name, array in expected.items()
        }
        try:
            start = ckpt.attach(stateful={"place": place})
            found = ckpt.load(start, wanted)
        except Exception as error:
            report(hosts=hosts, error=type(error).__name__)
            continue
    wrong = [
        name
        for name, array in found.items()
        if array.sharding != wanted[name].sharding
        or array.dtype != expected[name].dtype
        or any(bits(s.data) != bits(expected[name][s.index]) for s in array.addressable_shards)
    ]
    report(hosts=hosts, start=start, own=place.value, wrong=wrong)
