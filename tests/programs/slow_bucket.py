"""Two processes read from a bucket whose connections are slow: see ``test_slow_reads.py``.

python slow_bucket.py INDEX COUNT PORT DIRECTORY
"""

from __future__ import annotations

import sys
import time

import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding
from processes_program import MESH, P, jax, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.storage.medium import bucket, location

bucket._TENSORSTORE["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "1"
directory = sys.argv[4]
host = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
rows = NamedSharding(MESH, P("fsdp"))
state = {"w": jax.make_array_from_callback(host.shape, rows, lambda index: host[index])}
for run in ("never", "once"):
    with TorchaxCheckpointer(f"{directory}/{run}") as ckpt:
        ckpt.save(1, state=state, force=True)
    options = CheckpointOptions(process_timeout_secs=6 if run == "never" else 60)
    began = time.monotonic()
    try:
        found = TorchaxCheckpointer(f"{directory}/{run}", options=options).load(1, state)["w"]
    except CheckpointError as error:
        report(error=str(error), kind=type(error).__name__)
    else:
        parts = found.addressable_shards
        same = all(np.asarray(s.data).tobytes() == host[s.index].tobytes() for s in parts)
        report(same=same, secs=time.monotonic() - began)
if jax.process_index() == 0:
    prefix = directory.removeprefix("gs://bucket/")
    store = ts.KvStore.open(
        {"driver": "gcs", "bucket": "bucket", "path": f"{prefix}/shared/"},
        context=location.reading_context(),
    ).result()
    began = time.monotonic()
    reads = [store.read(str(i)) for i in range(32)]
    report(read=sum(len(read.result().value) for read in reads), secs=time.monotonic() - began)
