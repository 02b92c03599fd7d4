"""Processes save a state of which only the adapters change, as in a fine-tuning with LoRA.

python reuse_on_processes.py INDEX COUNT PORT DIRECTORY FIRST LAST SETTINGS

Saves the steps FIRST to LAST, each of which holds ``state(mesh, step)``. SETTINGS is JSON: "model":
the size of the mesh's second axis (default 2); "keep": how many steps are kept (default all);
"restored": the step to load and compare first; "kill": the process that kills itself in the last
save, after it has linked; "odd": the process that fails at the given step, while it links; "late":
the one that fails at the given step, when it has written; "mode": the snapshot; "changed": the step
from which on the base has other values; "ramdisks": the folder of local tiers, which save each step
too; "durable": the steps that are saved durably (default all); "host": whether the state also has
leaves on the host, of which one, "changing", has other values from the step "changed" on;
"stateful": whether each process has a state of its own, of 2 MiB that do not change; "lost": the
step before which the step two before it loses a file that process 1 wrote; "same": the leaves that
do not change are the same objects in all steps (in a run that goes on, those that ``load``
returned), and identity proves their values, as on TPUs; "other": the process that gets another
object for one of them before the given steps; "differs": the process that before the given step
changes its shards of one of them, so that the array is another object there alone.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from processes_program import COUNT, INDEX, patch, report, shards, spread

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, errors, policies
from torchax_ckpt.processes.messages import Messages
from torchax_ckpt.saving.unchanged import identities
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.medium import local_medium
from torchax_ckpt.storage.writing import fetching

SPECS: dict[str, Any] = {
    "all": (None,), "columns": (None, "data"), "rows": ("model",), "sharded": ("data", "model"),
}  # fmt: skip
SHAPE = (512, 1024)  # 2 MiB


def mesh_of(model: int) -> Mesh:
    """All devices as data x model."""
    return Mesh(np.array(jax.devices()).reshape(-1, model), ("data", "model"))


def values(step: int, changed: int | None = None) -> dict[str, Any]:
    """The values of all leaves at a step."""
    base = {
        name: np.random.default_rng(seed).random(SHAPE, np.float32)
        for seed, name in enumerate(SPECS)
    }
    if changed is not None and step >= changed:
        base["rows"][-1, -1] = 2
    layers = {
        str(i): {
            "lora": np.full((16, 16), 1000 * i + step, np.float32),
            "w": np.random.default_rng(10 + i).random((256, 256), np.float32),
        }
        for i in range(3)
    }
    return {"base": base, "layers": layers}


def state(mesh: Mesh, step: int, changed: int | None = None) -> dict[str, Any]:
    """The leaves at a step, on all devices."""
    found = values(step, changed)
    layers = {
        i: {
            "lora": spread(layer["lora"], None, mesh=mesh),
            "w": spread(layer["w"], "data", mesh=mesh),
        }
        for i, layer in found["layers"].items()
    }
    base = {name: spread(host, *SPECS[name], mesh=mesh) for name, host in found["base"].items()}
    return {"base": base, "layers": layers}


def with_host(state: dict[str, Any], step: int, changed: int | None = None) -> dict[str, Any]:
    """The state with leaves on the host: two large ones, two that are stacked, and a small one."""
    large = {
        name: np.random.default_rng(seed).random(SHAPE, np.float32)
        for seed, name in enumerate(("changing", "table"), 20)
    }
    if changed is not None and step >= changed:
        large["changing"][-1, -1] = 2
    stacked = {str(i): {"statistics": np.full((256, 128), i, np.float32)} for i in range(2)}
    host = {**large, "small": np.full(4, step, np.float32), "stacked": stacked}
    return dict(sorted({**state, "host": dict(sorted(host.items()))}.items()))


class Buffer:
    """A state that each process has for itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": np.random.default_rng(INDEX).random(1 << 18)}

    def load_state_dict(self, state: Any) -> None:
        pass


def is_same(found: Any, expected: Any) -> bool:
    """Whether the shards of this process, and the leaves on the host, have the same bits."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(
        shards(a) == shards(b) and getattr(a, "sharding", None) == getattr(b, "sharding", None)
        for a, b in pairs
    )


def written(directory: epath.Path, step: int, began: float) -> int:
    """The bytes in files of a step that were written since ``began``; a link changes no time."""
    state = pathlib.Path(directory) / str(step) / "state"
    found = [path.stat() for path in state.rglob("d/*")]
    return sum(file.st_size for file in found if file.st_mtime >= began)


def lose_file(directory: epath.Path, step: int) -> None:
    """Removes a file of unchanged arrays that process 1 wrote."""
    folder = pathlib.Path(directory) / str(step) / "state" / "ocdbt.process_unchanged0x1"
    max(folder.rglob("d/*"), key=lambda path: path.stat().st_size).unlink()


counts = {"messages": 0, "arrays": 0}


def count() -> None:
    """Counts what this process sends to others, and fetches from its devices, but small arrays."""
    send, start = Messages._set, fetching.start

    def sending(self: Any, *args: Any) -> None:
        counts["messages"] += 1
        send(self, *args)

    def starting(array: Any, *scratch: Any) -> Any:
        counts["arrays"] += array.size >= 1 << 16
        return start(array, *scratch)

    patch(Messages, "_set", sending)
    patch(fetching, "start", starting)


def with_same(found: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The state ``found``, with the changing leaves of ``now``."""
    layers = {
        i: {**layer, "lora": now["layers"][i]["lora"]} for i, layer in found["layers"].items()
    }
    return {**found, "layers": layers}


def changed_here(array: jax.Array) -> jax.Array:
    """The array with other values in the shards of this process."""
    parts = [
        jax.device_put(np.asarray(shard.data) + 1, shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def main() -> None:
    directory = epath.Path(sys.argv[4])
    first, last, settings = int(sys.argv[5]), int(sys.argv[6]), json.loads(sys.argv[7])
    mesh = mesh_of(settings.get("model", 2))
    changed = settings.get("changed")
    keep = settings.get("keep")
    options = CheckpointOptions(
        reuse=settings.get("reuse", True),
        snapshot=settings.get("mode", "auto"),
        process_timeout_secs=settings.get("timeout_secs", 60),
    )
    link, gathered = local_medium.link_folder, block_digests.gathered

    def at(step: int) -> dict[str, Any]:
        base_changed = changed if "host" not in settings else None
        on_devices = state(mesh, step, base_changed)
        if same:
            on_devices = with_same(same, on_devices)
        return with_host(on_devices, step, changed) if "host" in settings else on_devices

    def killed(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        time.sleep(0.5)  # so that the others have linked too
        os.kill(os.getpid(), signal.SIGKILL)

    def failed(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    same: dict[str, Any] = {}
    if "same" in settings:
        patch(identities, "is_proof", lambda array: True)
        same = state(mesh, 0)
    count()
    durable = tuple(settings.get("durable", ()))
    policy = policies.PreserveAll() if keep is None else policies.LatestN(keep)
    local, every = None, policies.FixedIntervalPolicy(1)
    if ramdisks := settings.get("ramdisks"):
        local = LocalTier(f"{ramdisks}/{INDEX}", save_decision_policy=every, keep=20)
    ckpt = TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy(durable) if durable else every,
        preservation_policy=policy,
        local=local,
        options=options,
    )
    ckpt.attach(stateful={"own": Buffer()} if settings.get("stateful") else None)
    if (restored := settings.get("restored")) is not None:
        current = at(restored)
        abstract = jax.tree.map(
            lambda a: (
                a
                if isinstance(a, np.ndarray)
                else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            ),
            current,
        )
        ckpt.restore(restored, strict=False)  # the rest of the state is loaded
        loaded = ckpt.load(restored, abstract)
        report(is_restored=is_same(loaded, current))
        same = same and loaded
    for step in range(first, last + 1):
        began = time.time() - 0.02  # the clock of files is coarse
        counts.update(messages=0, arrays=0)
        if step == last and settings.get("kill") == INDEX:
            local_medium.link_folder = killed
        if step == settings.get("lost") and INDEX == 0:
            lose_file(directory, step - 2)
        other, *steps = settings.get("other", [None])
        if other == INDEX and step in steps:
            same["base"]["rows"] = state(mesh, 0)["base"]["rows"]
        if settings.get("differs") == [INDEX, step]:
            same["base"]["sharded"] = changed_here(same["base"]["sharded"])
        is_odd = settings.get("odd") == [INDEX, step]
        local_medium.link_folder = failed if is_odd else local_medium.link_folder
        is_late = settings.get("late") == [INDEX, step]
        block_digests.gathered = failed if is_late else gathered  # type: ignore[assignment]
        try:
            ckpt.save(step, state=at(step), force=local is None)
            ckpt.wait_until_finished()
        except errors.CheckpointError as error:
            report(step=step, failed=str(error))
            if "kill" in settings:
                os._exit(3)  # JAX would wait for the dead one
        else:
            is_local = "://" not in str(directory)
            new = written(directory, step, began) if INDEX == 0 and is_local else None
            report(step=step, new=new, messages=counts["messages"], fetched=counts["arrays"])
        local_medium.link_folder = link if is_odd else local_medium.link_folder
    ckpt.close()
    report(steps=ckpt.all_steps(), count=COUNT)


if __name__ == "__main__":
    main()
