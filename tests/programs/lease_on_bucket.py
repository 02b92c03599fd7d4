"""Serves a bucket that keeps conditions on generations, and tries record and lease on it.

    python lease_on_bucket.py PORT

Prints "all is well" at its end.
"""

from __future__ import annotations

import http
import sys
import threading
from typing import Any

from gcp_storage_emulator.handlers import objects

# Google's server keeps conditions on generations, and names the one it sends; the emulator
# does neither.
lock = threading.Lock()


def generation(storage: Any, bucket: Any, name: Any) -> Any:
    try:
        return str(storage.get_file_obj(bucket, name)["generation"])
    except Exception:
        return "0"


def conditional(act: Any, name_of: Any) -> Any:
    def checked(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        condition = request.query.get("ifGenerationMatch")
        with lock:
            if condition and condition[0] != generation(
                storage, request.params["bucket_name"], name_of(request)
            ):
                response.status = http.HTTPStatus.PRECONDITION_FAILED
                return None
            return act(request, response, storage, *args, **kwargs)

    return checked


objects._multipart_upload = conditional(objects._multipart_upload, lambda r: r.query["name"][0])
objects.delete = conditional(objects.delete, lambda r: r.params["object_id"])


class WithGeneration:
    def __init__(self, response: Any, generation: Any) -> None:
        self.__dict__.update(response=response, generation=generation)

    def __getattr__(self, name: Any) -> Any:
        return getattr(self.response, name)

    def __setattr__(self, name: Any, value: Any) -> None:
        setattr(self.response, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.response[key] = value

    def write_file(self, *args: Any, **kwargs: Any) -> None:
        self.response["x-goog-generation"] = self.generation
        self.response.write_file(*args, **kwargs)


def download(
    request: Any,
    response: Any,
    storage: Any,
    *args: Any,
    _download: Any = objects.download,
    **kwargs: Any,
) -> Any:
    found = generation(storage, request.params["bucket_name"], request.params["object_id"])
    if found != "0":
        response = WithGeneration(response, found)
    return _download(request, response, storage, *args, **kwargs)


objects.download = download

# Its table of routes takes the functions as they are when it is imported.
from gcp_storage_emulator.server import create_server  # noqa: E402

server = create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket")
server.start()
try:
    import dataclasses
    import time

    import torchax

    torchax.enable_globally()
    import numpy as np
    from etils import epath

    from torchax_ckpt import TorchaxCheckpointer
    from torchax_ckpt.errors import LeaseError, SaveError
    from torchax_ckpt.storage.directory.compare_and_swap import Conflict, record_at
    from torchax_ckpt.storage.directory.lease_holder import LeaseHolder
    from torchax_ckpt.storage.writing import array_writer

    def raises(kind: Any, call: Any) -> Any:
        try:
            call()
        except kind as error:
            return str(error)
        raise AssertionError(f"no {kind.__name__}")

    # The record: one of two that saw the same wins.
    record = record_at("gs://bucket/records/one")
    assert record.read() is None
    first = record.swap(None, b"1")
    raises(Conflict, lambda: record.swap(None, b"2"))
    second = record.swap(first, b"2")
    raises(Conflict, lambda: record.swap(first, b"3"))
    record.remove(first)
    assert record.read() == second, (record.read(), second)
    assert record.swap(first, b"2") == second  # sent again after its answer was lost
    record.remove(second)
    assert record.read() is None

    # The lease.
    url = "gs://bucket/run"
    state = {"w": np.arange(3)}
    a, b = TorchaxCheckpointer(url), TorchaxCheckpointer(url)
    a.save(1, state=state)
    assert "this very process" in raises(LeaseError, lambda: b.save(2, state=state, force=True))
    a.wait_until_finished()
    a._directory._lease.renew()

    # Lost while a step is being written: the commit mark is never set.
    lease = epath.Path(url) / "lease"
    other = LeaseHolder("t", "tpu-vm-7", 4711, "another kernel", 1, 0.0, time.time())
    write = array_writer.write_arrays

    def lose(*args: Any, **kwargs: Any) -> Any:
        lease.write_bytes(other.to_bytes())
        return write(*args, **kwargs)

    array_writer.write_arrays = lose
    a.save(2, state=state, force=True)
    assert "held by host tpu-vm-7" in raises(SaveError, a.wait_until_finished)
    assert (epath.Path(url) / "2" / "state").exists()
    assert a.all_steps() == [1]
    raises(LeaseError, lambda: a.save(3, state=state, force=True))
    raises(SaveError, a.close)
    array_writer.write_arrays = write

    # That one has died elsewhere: taken over when its time is over.
    b.close()
    lease.write_bytes(dataclasses.replace(other, renewed_secs=time.time() - 58).to_bytes())
    with TorchaxCheckpointer(url) as c:
        began = time.monotonic()
        assert c.save(2, state=state, force=True)
        assert time.monotonic() - began < 40
    assert c.all_steps() == [1, 2]
    assert not lease.exists()
    print("all is well")
finally:
    server.stop()
