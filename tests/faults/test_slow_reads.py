"""Reads that hardly advance: sent again, named and given up, or logged; slow ones succeed."""

from __future__ import annotations

import collections
import logging
import re
import threading
import time
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import torch
from etils import epath
from gcs_server import FaultyServer
from support import PROGRAMS
from support.compare import assert_trees_identical, bits
from support.processes import run_processes

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.arrays import read_arrays

pytest_plugins = ("gcs_fixtures",)
LARGE_BYTES = 30_000  # arrays, not the index that says where they lie


def test_a_restore_from_a_bucket_that_trickles_fails_by_name_and_changes_nothing(
    gcs: FaultyServer, url: str
) -> None:
    model = torch.nn.Linear(128, 128).to("jax")
    options = CheckpointOptions(process_timeout_secs=0.4)
    with TorchaxCheckpointer(url, options=options) as ckpt:
        ckpt.attach(model)
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        saved = bits(model.weight)
        with torch.no_grad():
            model.weight += 1
        trained = bits(model.weight)
        gcs.rate_of = lambda _, nbytes: 10 if nbytes > LARGE_BYTES else None
        began = time.monotonic()
        message = (
            rf"process 0 waits for model/weight in {url}/1/state/ocdbt.process_0/d/\w+, "
            r"bytes \d+ to \d+; all its reads together got \d+ bytes in \d+ s.*min_read_bytes_per"
        )
        with pytest.raises(DirectoryError, match=message):
            ckpt.restore(1)
        assert time.monotonic() - began < 5
        assert bits(model.weight) == trained
        gcs.calm()
        ckpt.restore(1)
        assert bits(model.weight) == saved


def test_a_read_of_a_file_that_hangs_is_logged_by_name_and_goes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": jnp.arange(1e4)}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state, force=True)

    def hanging(host: np.ndarray, **kwargs: Any) -> Any:
        pair: tuple[Any, Any] = ts.Promise.new()
        promise, future = pair

        def read(source: Any) -> ts.Future:
            target = ts.array(host, **kwargs)
            threading.Timer(1.3, lambda: promise.set_result(target.write(source).result())).start()
            return future

        return types.SimpleNamespace(write=read)

    monkeypatch.setattr(read_arrays, "ts", types.SimpleNamespace(**{**vars(ts), "array": hanging}))
    reader = TorchaxCheckpointer(directory, options=CheckpointOptions(process_timeout_secs=0.4))
    with caplog.at_level(logging.WARNING, logger="torchax_ckpt"):
        assert_trees_identical(reader.load(1), state)
    files = re.findall(r"process 0 waits for state/w in (.*), bytes \d+ to", caplog.text)
    assert files, caplog.text
    assert Path(files[0]) in (directory / "1" / "state").rglob("d/*")


@pytest.mark.slow
def test_one_slow_process_fails_all_by_name_and_one_slow_request_of_33_is_replaced(
    gcs: FaultyServer, url: str
) -> None:
    """The program shortens the 60 s in which a request must get 10 kB/s to 1 s."""
    sent: collections.Counter[str] = collections.Counter()
    for i in range(32):  # reads that share 2 MB/s, each for twice the time of the limit
        (epath.Path(url) / "shared" / str(i)).write_bytes(bytes(150_000))

    def rate_of(request: str, nbytes: int) -> float | None:
        found = re.search("%2F(shared|(never|once).*process_1)%2F", request)
        if nbytes < LARGE_BYTES or not request.startswith("GET ") or found is None:
            return None
        kind = found[2] or found[1]
        sent[kind] += 1
        if kind == "shared":
            return 2e6 / 32
        return 20 if kind == "never" or sent[kind] == 1 else None

    gcs.rate_of = rate_of
    arguments = PROGRAMS / "arrays_on_processes.py", 2, "slow_reads", url
    found = run_processes(*arguments, env=gcs.environment())
    place = rf"w in {url}/never/1/state/ocdbt.process_1/d/\w+, bytes \d+ to \d+"
    message = rf"process 1 waits for state/{place}; all its reads together got 0 bytes in [56] s"
    for failed, again, *_ in found:
        assert re.search(message, failed["error"]), failed
        assert again["same"]
    assert again["secs"] > 1  # on process 1
    assert sent["once"] > 1  # sent again
    assert found[0][2]["read"] == 32 * 150_000
    assert found[0][2]["secs"] > 2
    assert sent["shared"] == 32  # none was sent again
