"""Programs of one process whose saves begin after the last line of the program.

    python ends.py SCENARIO DIRECTORY

SCENARIO is a function of this file.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import sys
import threading
import time
import weakref

import numpy as np
import torch
import torchax
from support.stages import at, fail_at

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.storage.medium import bucket
from torchax_ckpt.telemetry.events import Event

torchax.enable_globally()
ALWAYS = policies.FixedIntervalPolicy(1)
STATE = {"w": np.arange(3)}
attached = threading.Event()
left: TorchaxCheckpointer  # nobody closes it


FULL = OSError(28, "No space left on device")


def save_slowly() -> None:
    at("write the arrays", lambda: time.sleep(0.3))


def tell(event: Event) -> None:
    sys.stdout.write(f"{event.name} {event.step}\n")


def until_main_has_ended() -> None:
    """Waits until Python ends its executors, which it does before it waits for threads."""
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.01)


def train(directory: str) -> None:
    """Saves with and without close, and finds what an earlier checkpointer has saved."""
    global left
    torchax.enable_globally()
    for start in (0, 2):
        local = LocalTier(f"{directory}/local", save_decision_policy=ALWAYS)
        with TorchaxCheckpointer(f"{directory}/run", local=local) as ckpt:
            assert ckpt.attach(torch.nn.Linear(2, 2).to("jax")) == start
            attached.set()
            until_main_has_ended()
            for step in range(start + 1, start + 3):
                assert ckpt.save(step, force=True)
    save_slowly()
    left = TorchaxCheckpointer(f"{directory}/left")
    assert left.save(1, state=STATE)


def thread(directory: str) -> None:
    threading.Thread(target=train, args=[directory]).start()
    attached.wait()


def executor(directory: str) -> None:
    concurrent.futures.ThreadPoolExecutor().submit(train, directory)
    attached.wait()


def lookups(directory: str) -> None:
    """Looks up a host as gcsfs does, on an event loop of its own, for a thread that goes on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    bucket.prepare_clients(loop)

    def look_up() -> None:
        until_main_has_ended()
        found = asyncio.run_coroutine_threadsafe(loop.getaddrinfo("localhost", 80), loop)
        print(len(found.result()) > 0)

    threading.Thread(target=look_up).start()


def handler(directory: str) -> None:
    """Saves once more in an exit handler, with a checkpointer whose last save is in flight."""
    global left
    save_slowly()
    left = TorchaxCheckpointer(f"{directory}/left", on_event=tell)
    left.save(1, state=STATE)
    atexit.register(lambda: left.save(2, state=STATE))


def finalizer(directory: str) -> None:
    """Saves when Python calls finalizers, after this library has finished."""
    global left
    left = TorchaxCheckpointer(f"{directory}/left")
    left.save(1, state=STATE)
    weakref.finalize(tell, lambda: print(left.save(2, state=STATE, force=True)))


def failing(directory: str) -> None:
    """All saves fail, before and after the main thread has ended; nobody closes anything."""
    global left
    fail_at("write the arrays", FULL)
    left = TorchaxCheckpointer(f"{directory}/left")
    left.save(1, state=STATE)

    def go_on() -> None:
        until_main_has_ended()
        with TorchaxCheckpointer(f"{directory}/run") as ckpt:
            for step in (1, 2):
                ckpt.save(step, state=STATE, force=True)

    threading.Thread(target=go_on).start()


def mended(directory: str) -> None:
    """A save that fails after the main thread has ended, and one that does not."""

    def go_on() -> None:
        until_main_has_ended()
        with TorchaxCheckpointer(f"{directory}/run") as ckpt:
            fail_at("write the arrays", FULL, number=1)
            for step in (1, 2):
                ckpt.save(step, state=STATE, force=True)
                ckpt._saver.wait()

    threading.Thread(target=go_on).start()


globals()[sys.argv[1]](sys.argv[2])
