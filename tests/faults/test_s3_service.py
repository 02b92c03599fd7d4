"""s3://: where the bucket is, who asks, how long a request may take, and what errors say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from aiobotocore import endpoint
from botocore import exceptions, retryhandler
from etils import epath
from s3_server import FaultyS3, connected
from s3fs.errors import translate_boto_error
from support.compare import assert_trees_identical
from support.processes import run_python
from support.stages import at
from support.steps import save, state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import DirectoryError, SaveError
from torchax_ckpt.storage.medium import bucket, medium, storage_errors
from torchax_ckpt.storage.medium.compare_and_swap import Seen
from torchax_ckpt.storage.medium.s3 import s3_medium, service

pytest_plugins = ("s3_fixtures",)

# The settings of other tests, and of whoever runs these.
_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
CONFIG = """
[profile run]
region = eu-central-1
endpoint_url = http://localhost:{port}
s3 =
    addressing_style = {style}
"""
KEYS = """
[run]
aws_access_key_id = OF-THE-FILE
aws_secret_access_key = the-other-secret
"""


@pytest.fixture
def askers(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The accounts by which the server is asked, each with its region and session token."""
    found: set[str] = set()
    answer = s3.store.answer

    def noting(method: str, path: str, headers: Any, body: bytes) -> Any:
        if signed := headers.get("Authorization", ""):
            account, _, region, *_ = signed.partition("Credential=")[2].split("/")
            found.add(" ".join((account, region, headers.get("X-Amz-Security-Token", ""))).strip())
        return answer(method, path, headers, body)

    monkeypatch.setattr(s3.store, "answer", noting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("style", ["path", "virtual"])
def test_a_profile_says_where_the_bucket_is_and_who_asks(
    style: str,
    s3: FaultyS3,
    s3_url: str,
    askers: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config").write_text(CONFIG.format(port=s3.server_port, style=style))
    (tmp_path / "keys").write_text(KEYS)
    files = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
    }
    find = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: find(
            "localhost" if str(host).endswith(".localhost") else host, *rest, **more
        ),
    )
    environment = {**_CLEAN, **files, "AWS_PROFILE": "run"}
    with connected(mock.patch.dict(os.environ, environment, clear=True)):
        with TorchaxCheckpointer(s3_url) as ckpt:
            save(ckpt, 1)
        assert_trees_identical(TorchaxCheckpointer(s3_url).load(1), state(1))
        spec = service.kvstore(s3_url)
    credentials = {"type": "profile", "profile": "run"}
    credentials |= {"config_file": files["AWS_CONFIG_FILE"]}
    credentials |= {"credentials_file": files["AWS_SHARED_CREDENTIALS_FILE"]}
    assert (spec["aws_credentials"], spec["aws_region"]) == (credentials, "eu-central-1")
    assert askers == {"OF-THE-FILE eu-central-1"}
    assert s3.hosts == {"bucket.localhost" if style == "virtual" else "localhost"}


class _Metadata(BaseHTTPRequestHandler):
    """The service that gives a machine, or a container, the keys of its role."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        keys = {"AccessKeyId": "OF-A-ROLE", "SecretAccessKey": "a-secret", "Token": "a-token"}
        times = {"Expiration": "2099-01-01T00:00:00Z", "LastUpdated": "2026-01-01T00:00:00Z"}
        is_list = self.command == "PUT" or self.path.endswith("/security-credentials/")
        answer = json.dumps({"Code": "Success", "Type": "AWS-HMAC", **keys, **times})
        content = ("a-role" if is_list else answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_GET  # noqa: N815 - of the token with which a machine asks


@contextlib.contextmanager
def metadata() -> Iterator[str]:
    """Serves the keys of a role; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "path", "kind"),
    [
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "/", "imds"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "/role", "ecs"),
    ],
)
def test_a_machine_or_a_container_has_a_role(
    variable: str, path: str, kind: str, s3: FaultyS3, s3_url: str, askers: set[str]
) -> None:
    environment = {**_CLEAN, "AWS_ENDPOINT_URL_S3": s3.url, "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    with metadata() as address:
        environment[variable] = address + path
        with connected(mock.patch.dict(os.environ, environment, clear=True)):
            with TorchaxCheckpointer(s3_url) as ckpt:
                save(ckpt, 1)
            assert_trees_identical(TorchaxCheckpointer(s3_url).load(1), state(1))
            assert service.kvstore(s3_url)["aws_credentials"] == {"type": kind}
    assert askers == {"OF-A-ROLE us-east-1 a-token"}


def test_credentials_are_named_by_where_they_are_and_never_written_down(
    s3: FaultyS3, s3_url: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0, "torchax_ckpt")
    with TorchaxCheckpointer(s3_url) as ckpt:
        save(ckpt, 1)
    assert ckpt.all_steps() == [1]
    spec = service.kvstore(s3_url)
    assert spec["aws_credentials"] == {"type": "environment"}
    assert spec["endpoint"] == s3.url
    said = capfd.readouterr()
    assert "Failed to" not in said.err  # as TensorStore says of files that are missing
    assert [line for line in said.err.splitlines() if "torchax_ckpt:" not in line] == []
    prefix = s3_url.removeprefix("s3://bucket/")
    stored = b"".join(s3.store.get(name) for name in s3.store.names(f"{prefix}/"))
    for secret in ("the-secret", "S3RVER"):
        assert secret not in f"{spec}{said.out}{caplog.text}"
        assert secret.encode() not in stored


def test_keys_of_a_process_in_a_profile_are_refused_with_those_that_tensorstore_can_use(
    s3: FaultyS3, s3_url: str, tmp_path: Path
) -> None:
    process = tmp_path / "process"
    keys = {"Version": 1, "AccessKeyId": "OF-A-PROCESS", "SecretAccessKey": "a-secret"}
    process.write_text(f"#!/bin/sh\necho '{json.dumps(keys)}'\n")
    process.chmod(0o700)
    (tmp_path / "config").write_text(f"[profile run]\ncredential_process = {process}\n")
    environment = {**_CLEAN, "AWS_ENDPOINT_URL_S3": s3.url, "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_PROFILE": "run", "AWS_CONFIG_FILE": str(tmp_path / "config")}
    environment |= {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    said = "s3fs found credentials by 'custom-process'.*AWS_PROFILE.*once they expire, after"
    with (
        connected(mock.patch.dict(os.environ, environment, clear=True)),
        pytest.raises(DirectoryError, match=said),
    ):
        TorchaxCheckpointer(s3_url)
    assert s3.names(s3_url) == []


def test_keys_of_sso_are_refused_with_those_that_tensorstore_can_use(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_method", lambda: "sso")
    with pytest.raises(DirectoryError, match="s3fs found credentials by 'sso'.*AWS_PROFILE"):
        service.kvstore(s3_url)


def test_one_request_has_the_bounds_that_those_to_other_buckets_have(s3: FaultyS3) -> None:
    timeout = service.filesystem().s3._endpoint.http_session._timeout
    assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (600, 30, 30)


def test_a_request_without_an_answer_is_sent_three_times_and_names_what_it_was_for(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = epath.Path(s3_url) / "lease"
    record = medium.of(place).record(place)
    record.remove(record.swap(None, b"1"))
    requests: list[str] = []
    s3.kinds, s3.rate, s3.slow_secs, s3.hook = ("slow",), 1.0, 1.0, requests.append
    with (
        connected(mock.patch.object(service, "SILENCE_SECS", 0.2)),
        pytest.raises(OSError, match="lease.*Read timeout"),
    ):
        record.read()
    assert len(requests) == 3
    monkeypatch.setattr(s3_medium, "_CHECK_SECS", 0.1)
    with pytest.raises(TimeoutError, match=f"{place}: no answer for 0 s") as caught:
        record.remove(Seen(b"1", "1"))
    assert "check the network" in storage_errors.advice(caught.value, place)
    monkeypatch.setattr(service, "REQUEST_SECS", 0.1)
    for act in (record.read, lambda: record.swap(None, b"2")):
        with pytest.raises(TimeoutError, match="lease: no answer"):
            act()


def test_a_refused_request_is_sent_for_half_a_minute(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(secs: float) -> None:
        slept.append(secs)

    monkeypatch.setattr(endpoint, "asyncio", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(retryhandler, "random", types.SimpleNamespace(random=lambda: 0.5))
    place = epath.Path(s3_url) / "lease"
    for kind in ("500", "503"):
        slept.clear()
        s3.kinds, s3.rate = (kind,), 1.0
        with pytest.raises(OSError, match="on purpose"):
            medium.of(place).read(place)
        assert sum(slept) == 31.5


def test_expired_credentials_are_no_damage_to_a_step(s3: FaultyS3, s3_url: str) -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    with TorchaxCheckpointer(s3_url) as ckpt:
        ckpt.attach(model)
        save(ckpt, 1, 2, of=None)
    s3.rate, s3.kinds, s3.concerned = 1.0, ("400",), r"^GET .*/d/[0-9a-f]"
    with pytest.raises(DirectoryError, match=r"step 2 .*cannot be read now.*aws sts get-caller"):
        TorchaxCheckpointer(s3_url).attach(model)
    s3.rate = 0.0
    mend = at("read back", lambda: setattr(s3, "rate", 1.0))
    with (
        pytest.raises(SaveError, match=r"step 3 .*cannot be read now.*aws sts get-caller"),
        TorchaxCheckpointer(s3_url, options=CheckpointOptions(read_back=True)) as ckpt,
    ):
        save(ckpt, 3)
    mend()
    s3.calm()
    assert ckpt.all_steps() == [1, 2, 3]
    assert_trees_identical(ckpt.load(3), state(3))


CREDENTIALS, NETWORK = "aws sts get-caller-identity", "check the network"
EXPIRED = "Credentials were refreshed, but the refreshed credentials are still expired."


def answered(code: str, status: int = 400) -> exceptions.ClientError:
    """What botocore raises for an answer of the service."""
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return exceptions.ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (exceptions.NoCredentialsError(), CREDENTIALS),
        (exceptions.CredentialRetrievalError(provider="sso", error_msg="no"), CREDENTIALS),
        (exceptions.ProfileNotFound(profile="run"), CREDENTIALS),
        (RuntimeError(EXPIRED), CREDENTIALS),
        (answered("InvalidToken"), CREDENTIALS),
        (answered("ExpiredToken"), CREDENTIALS),
        (answered("AccessDenied", 403), CREDENTIALS),
        (answered("AuthorizationHeaderMalformed"), "the region is wrong"),
        (answered("PermanentRedirect", 301), "the region is wrong"),
        (ValueError("UNAUTHENTICATED: Error reading an object"), CREDENTIALS),
        (ValueError("INVALID_ARGUMENT: Error [http_response_code='400']"), CREDENTIALS),
        (answered("NotImplemented", 501), "does not know this request"),
        (answered("NoSuchBucket", 404), "aws s3 mb"),
        (exceptions.EndpointConnectionError(endpoint_url="http://Tokens.example"), NETWORK),
        (answered("SlowDown", 503), NETWORK),
        (ValueError("ABORTED: All 32 attempts failed [http_response_code='503']"), NETWORK),
    ],
    ids=repr,
)
def test_errors_say_whether_the_account_the_service_or_the_network_is_to_blame(
    error: Exception, todo: str
) -> None:
    place = "s3://bucket/Token-400-501"
    with pytest.raises(OSError) as caught, bucket.as_os_error(place):  # noqa: PT011
        raise translate_boto_error(error)  # as our own requests do it, by way of s3fs
    for each in (error, caught.value):
        assert todo in storage_errors.advice(each, place)
        assert storage_errors.is_unavailable(each) or "NoSuchBucket" in str(error)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"AWS_ENDPOINT_URL_S3": "minio.local"}, "Invalid endpoint: minio.local"),
        ({"AWS_CONFIG_FILE": "odd", "AWS_PROFILE": "odd"}, "AttributeError"),
        ({"AWS_CONFIG_FILE": "unreadable"}, "ConfigParseError"),
        ({"AWS_DEFAULT_REGION": "us east 1"}, "InvalidRegionError"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1/?token=secret"}, "endpoint without user inf"),
        ({"AWS_ENDPOINT_URL_S3": "http://me:secret@127.0.0.1:1"}, "endpoint without user inf"),
    ],
)
def test_settings_that_no_client_can_use_are_named_as_such(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "odd").write_text("[profile odd]\ns3 = bla\n")
    (tmp_path / "unreadable").write_text("nothing\n")
    if "AWS_CONFIG_FILE" in settings:
        settings = {**settings, "AWS_CONFIG_FILE": str(tmp_path / settings["AWS_CONFIG_FILE"])}
    program = """
        import traceback
        from torchax_ckpt import TorchaxCheckpointer
        from torchax_ckpt.errors import DirectoryError
        try:
            TorchaxCheckpointer("s3://bucket/run")
        except DirectoryError:
            print(traceback.format_exc())
    """
    printed = run_python(program, env=settings).stdout
    assert re.search(f"{said}.*Correct the settings", printed), printed
    assert "secret" not in printed


def test_no_credentials_are_called_so_at_construction(
    s3: FaultyS3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = service.filesystem().s3._request_signer
    monkeypatch.setattr(signer, "_credentials", None)
    with pytest.raises(DirectoryError, match=r"NoCredentialsError.*aws sts get-caller-identity"):
        TorchaxCheckpointer(s3_url)
