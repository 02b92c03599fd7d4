"""gs://: save, prune, resume and go back, against an emulator of Google Cloud Storage."""

from __future__ import annotations

import socket

import pytest
from support import run_python

PROGRAM = """
    import sys
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import create_server

    class WithGeneration:
        # Google's server names the generation of what it sends; the emulator leaves that out.
        def __init__(self, response, generation):
            self.__dict__.update(response=response, generation=generation)
        def __getattr__(self, name):
            return getattr(self.response, name)
        def __setattr__(self, name, value):
            setattr(self.response, name, value)
        def __setitem__(self, key, value):
            self.response[key] = value
        def write_file(self, *args, **kwargs):
            self.response["x-goog-generation"] = self.generation
            self.response.write_file(*args, **kwargs)

    def download(request, response, storage, *args, _download=objects.download, **kwargs):
        try:
            found = storage.get_file_obj(
                request.params["bucket_name"], request.params["object_id"])
            response = WithGeneration(response, str(found["generation"]))
        except Exception:
            pass  # not there: the emulator's own answer says so
        return _download(request, response, storage, *args, **kwargs)

    objects.download = download
    server = create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket")
    server.start()
    try:
        import torchax
        torchax.enable_globally()
        import numpy as np, torch
        from etils import epath
        from torchax_ckpt import TorchaxCheckpointer, policies

        def model():
            return torch.nn.Linear(8, 4).to("jax")

        first = model()
        with TorchaxCheckpointer(
            "gs://bucket/run", preservation_policy=policies.LatestN(2)
        ) as ckpt:
            assert ckpt.all_steps() == []
            assert ckpt.attach(first) == 0
            for step in (1, 2, 3):
                ckpt.save(step, metrics={"loss": step}, force=True)
        assert ckpt.all_steps() == [2, 3]
        # What a killed save leaves on a bucket: a step without its commit mark.
        epath.Path("gs://bucket/run/4/state").mkdir(parents=True)
        epath.Path("gs://bucket/run/4/state/_METADATA").write_text("{}")
        second = model()
        with TorchaxCheckpointer("gs://bucket/run") as ckpt:
            assert ckpt.attach(second) == 3
            for a, b in zip(first.parameters(), second.parameters()):
                np.testing.assert_array_equal(np.asarray(a.jax()), np.asarray(b.jax()))
            assert ckpt.metrics(3) == {"loss": 3}
            ckpt.save(4, force=True)
            ckpt.wait_until_finished()
            assert ckpt.all_steps() == [2, 3, 4]
            ckpt.restore(2)
            ckpt.save(3, force=True)
        names = {p.name for p in epath.Path("gs://bucket/run").iterdir()}
        assert names == {"2", "3", "abandoned-3", "abandoned-4"}, names
        print("all is well")
    finally:
        server.stop()
"""


# Most of it is gcsfs waiting, a minute at a time, for services that the emulator does not have.
@pytest.mark.timeout(600)
def test_a_run_on_a_bucket_is_saved_pruned_resumed_and_goes_back() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    result = run_python(
        PROGRAM,
        str(port),
        devices=1,
        timeout_secs=580,
        env={
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        },
    )
    assert "all is well" in result.stdout
