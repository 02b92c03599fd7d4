"""Starts Ray, on loopback only, and runs the Ray example with each command line given.

on_ray.py EXAMPLE SESSIONS ATTEMPTS COMMAND_LINE ...

SESSIONS is Ray's folder. Each time that Ray connects the workers, they add their number and JAX's
coordinator to the file ATTEMPTS. After the second time Ray is told that the node will be preempted.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

import ray
from ray._private import ray_constants, state, worker
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

example, sessions, attempts, *lines = sys.argv[1:]


def listen_on_loopback() -> None:
    """Runs in every process of Ray's; JAX's coordinator would listen on all addresses."""
    from ray.train.v2.jax import config

    connect = config._setup_jax_distributed_environment

    def connect_on_loopback(master_addr_with_port: str, num_workers: int, **rest: int) -> None:
        os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = master_addr_with_port
        if rest["index"] == 0:
            with open(attempts, "a") as file:
                file.write(f"{num_workers} {master_addr_with_port}\n")
        connect(master_addr_with_port, num_workers, **rest)

    config._setup_jax_distributed_environment = connect_on_loopback


def is_second_attempt_watched() -> bool:
    if not os.path.exists(attempts) or len(Path(attempts).read_text().splitlines()) < 2:
        return False
    actors = state.actors().values()
    alive = [actor["ActorClassName"] for actor in actors if actor["State"] == "ALIVE"]
    return "PreemptionWatcher" in alive  # Ray starts it on the node, if that is not yet drained


def announce_preemption() -> None:
    while not is_second_attempt_watched():
        time.sleep(0.05)
    worker.global_worker.gcs_client.drain_node(
        ray.get_runtime_context().get_node_id(),
        DRAIN_NODE_REASON_PREEMPTION,
        "announced by a test",
        int(time.time() + 3600) * 1000,
    )


ray_constants.ENABLE_RAY_CLUSTER = False  # else Ray replaces 127.0.0.1 by another address
ray.init(
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=False,
    _node_ip_address="127.0.0.1",
    _temp_dir=sessions,
    runtime_env={"worker_process_setup_hook": listen_on_loopback},
)
threading.Thread(target=announce_preemption, daemon=True).start()
# Of this process; the others have one device each.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
for line in lines:
    sys.argv = [example, *line.split()]
    runpy.run_path(example, run_name="__main__")
ray.shutdown()
