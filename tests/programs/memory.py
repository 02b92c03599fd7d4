"""Programs that print how much memory something takes.

    python memory.py SCENARIO ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
from pathlib import Path


def status(key: str) -> int:
    """Bytes of this process, of a key of Linux: VmRSS is resident, VmHWM its most, RssAnon own."""
    found = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def of_save(directory: str, max_host_bytes: str) -> None:
    """Prints how far memory grows during a save, and the bytes of the state; "0": no bound."""
    import jax
    import numpy as np
    from jax.experimental.layout import Format, Layout
    from jax.sharding import NamedSharding
    from support.training import P, fsdp_mesh

    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer

    # As on a device, what numpy is given of it is a copy: it lies the other way round in memory.
    where = Format(Layout((1, 0)), NamedSharding(fsdp_mesh(4), P("fsdp")))
    shapes = [(1024 + 8 * i, 4096) for i in range(12)]
    state = {f"w{i}": jax.device_put(np.ones(s, np.float32), where) for i, s in enumerate(shapes)}
    jax.block_until_ready(state)
    max_bytes = int(max_host_bytes) or None
    options = CheckpointOptions(max_host_bytes=max_bytes, snapshot="reference", compression=False)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state={"w": jax.numpy.ones(4)})
        ckpt.wait_until_finished()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present
        before = status("VmRSS")
        ckpt.save(2, state=state, force=True)
        ckpt.wait_until_finished()
        print(status("VmHWM") - before, sum(array.nbytes for array in state.values()))


def of_offload(directory: str, saves: str, megabytes: str) -> None:
    """Prints resident memory after 5 saves by offload and after all, and the bytes of the state."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from support.training import P, fsdp_mesh

    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

    rows, rng = NamedSharding(fsdp_mesh(4), P("fsdp")), np.random.default_rng(0)
    state = {
        f"layers.{i}.w": jax.device_put(rng.standard_normal((1000, 1000), np.float32), rows)
        for i in range(int(megabytes) // 4)
    }
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    options = CheckpointOptions(snapshot="offload", compression=False)
    keep = policies.LatestN(1)
    with TorchaxCheckpointer(directory, options=options, preservation_policy=keep) as ckpt:
        for number in range(1, int(saves) + 1):
            state = step(state)
            ckpt.save(number, state=state, force=True)
            ckpt.wait_until_finished()
            if number in (5, int(saves)):
                gc.collect()
                print(status("VmRSS"))
        print(sum(array.nbytes for array in state.values()))


def of_command(max_bytes: str, *arguments: str) -> None:
    """Runs a command of torchax-ckpt and prints how far its own memory has grown at most.

    MAX_BYTES is what the command may hold of the arrays that it reads.
    """
    # What a command imports takes memory of its own; it is there before the command begins.
    import safetensors  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    import torchax_ckpt.cli.app
    import torchax_ckpt.cli.convert
    import torchax_ckpt.formats.state_dict  # noqa: F401
    from torchax_ckpt.__main__ import main
    from torchax_ckpt.storage.arrays import read_arrays

    read_arrays.STREAMED_BYTES = int(max_bytes)
    peak, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, status("RssAnon"))  # what is mapped from files is not its own

    before, sys.argv = status("RssAnon"), ["torchax-ckpt", *arguments]
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, end.code
    finally:
        is_over.set()
        watching.join()
    print("grown:", peak - before)


def of_events(directory: str) -> None:
    """Prints MiB that reading the events of a run takes, how many there are, and the runs."""
    from etils import epath

    from torchax_ckpt.telemetry.journal import read_events

    before = status("VmHWM")
    runs = read_events(epath.Path(directory))
    found = (status("VmHWM") - before) >> 20, sum(map(len, runs.values())), sorted(runs)
    print(json.dumps(found))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
