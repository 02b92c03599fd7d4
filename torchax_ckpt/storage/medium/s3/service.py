"""The service of ``s3://`` that the environment and AWS's config files name, for both its clients.

TensorStore reads and writes array data, s3fs (through epath) does everything else. s3fs finds the
endpoint, the region and the credentials as botocore does. TensorStore is told where s3fs has found
them, and never the keys themselves, because session tokens expire. Left to itself, TensorStore
knows fewer places, and prints a line to stderr for each that has nothing.
"""

from __future__ import annotations

import functools
import os
import re
import urllib.parse
from typing import Any

from etils.epath import backend
from fsspec import asyn

from torchax_ckpt.errors import DirectoryError

SILENCE_SECS = 30  # without a byte, after which a request is given up
# One request of s3fs transfers at most some 50 MB.
REQUEST_SECS = 600
# botocore repeats a refused request for about half a minute, as gcsfs does.
_RETRIES = {"mode": "legacy", "total_max_attempts": 7}

# How botocore has found credentials -> the kind under which TensorStore finds the same.
_KINDS = {
    "env": "environment",
    "shared-credentials-file": "profile",
    "config-file": "profile",
    "assume-role": "profile",
    "assume-role-with-web-identity": "default",
    "container-role": "ecs",
    "iam-role": "imds",
}
# The hosts that TensorStore knows by itself.
_AWS = re.compile(r"s3([.-][a-z0-9-]+)?\.amazonaws\.com")
_CREDENTIALS = (
    "The account's credentials are missing, wrong or expired, it lacks the permission, or the "
    "region is wrong: check them (`aws sts get-caller-identity`, AWS_REGION), and grant "
    "s3:ListBucket on the bucket and s3:GetObject, s3:PutObject and s3:DeleteObject on its objects "
    "(the first two are enough to read)."
)
SETTINGS = (
    "Correct the settings that AWS's tools read: AWS_ENDPOINT_URL_S3 (it begins with http:// or "
    "https://, as the service expects), AWS_REGION, AWS_CA_BUNDLE, AWS_PROFILE and the files "
    "~/.aws/config and ~/.aws/credentials."
)
# Names and codes in errors of the service, of botocore and of TensorStore -> what to do.
_ADVICE = (
    ("ConfigParse|InvalidRegion|EndpointResolution|SSLError|InvalidConfig", SETTINGS),
    (
        "Credential|Token|Authoriz|Login|Profile|Redirect|AccessDenied|PermissionError|EACCES"
        r"|PERMISSION_DENIED|UNAUTHENTICATED|\b(301|400|401|403)\b",
        _CREDENTIALS,
    ),
    (
        "NoSuchBucket",
        "Check the bucket's name and the endpoint, or create it: aws s3 mb s3://BUCKET",
    ),
    ("NotImplemented|ENOSYS|501", "The service does not know this request: use another one."),
)


def filesystem() -> Any:
    """Returns the s3fs instance that epath uses, with this package's settings, without caches."""
    found = backend.fsspec_backend.fs("s3://")
    if found.config_kwargs.get("http_session_cls") is not _session_class():
        # The cache would miss what TensorStore or other processes wrote meanwhile.
        found.dircache.use_listings_cache = False
        found.config_kwargs |= {"http_session_cls": _session_class(), "retries": _RETRIES}
        found.retries = 3  # for a request without an answer
        found.connect(refresh=True)
    found.invalidate_cache()
    return found


@functools.cache
def _session_class() -> type:
    """Returns the class of connections that give up a request; botocore bounds only silence."""
    import aiohttp
    from aiobotocore import httpsession
    from botocore import exceptions

    class BoundedSession(httpsession.AIOHTTPSession):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._timeout = aiohttp.ClientTimeout(
                total=REQUEST_SECS, sock_connect=SILENCE_SECS, sock_read=SILENCE_SECS
            )

        async def send(self, request: Any) -> Any:
            try:
                return await super().send(request)
            except (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError) as error:
                # botocore would repeat it, and then s3fs all of that: for 12 minutes.
                raise exceptions.HTTPClientError(error=error) from error

    return BoundedSession


def kvstore(url: str) -> dict[str, Any]:
    """Returns the spec with which TensorStore opens a prefix; it has no secrets.

    Raises DirectoryError if TensorStore cannot use the credentials that s3fs has found.
    """
    client = filesystem().s3.meta
    bucket, slash, prefix = url.removeprefix("s3://").partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": prefix + slash}
    spec["aws_credentials"] = _credentials(url)
    endpoint = urllib.parse.urlsplit(client.endpoint_url.rstrip("/"))
    if _AWS.fullmatch(endpoint.hostname or ""):
        # Without a region, TensorStore asks for that of the bucket, unless its name has a dot.
        return {**spec, "aws_region": client.region_name} if "." in bucket else spec
    if (client.config.s3 or {}).get("addressing_style") == "virtual":
        spec["bucket"] = ""  # TensorStore appends it to the endpoint
        endpoint = endpoint._replace(netloc=f"{bucket}.{endpoint.netloc}")
    return {**spec, "endpoint": endpoint.geturl(), "aws_region": client.region_name}


def chains() -> str:
    """Returns in words where s3fs and TensorStore find their credentials, for messages."""
    method = _method()
    return (
        f"s3fs found its credentials by {method!r}, TensorStore by {_KINDS.get(method, method)!r}"
    )


def advice(names: str) -> str:
    """Returns what to do about an error with these names and codes; "" if they do not tell."""
    return next((text for pattern, text in _ADVICE if re.search(pattern, names)), "")


def _credentials(url: str) -> dict[str, str]:
    method = _method()
    if method == "anonymous":
        return {"type": method}
    if method not in _KINDS:
        found = "no credentials" if method == "none" else f"credentials by {method!r}"
        raise DirectoryError(
            f"{url}: s3fs found {found}, but TensorStore, which reads and writes the arrays, can "
            "use only AWS_ACCESS_KEY_ID in the environment, keys or an assumed role in a profile "
            "(AWS_PROFILE), a web identity, and roles of containers and machines. `eval $(aws "
            "configure export-credentials --format env)` turns others, such as SSO and "
            "credential_process, into variables of the environment. Nothing renews these: saves "
            "fail once they expire, after some hours at most. Roles are renewed.",
            path=url,
        )
    if (kind := _KINDS[method]) != "profile":
        return {"type": kind}
    setting = filesystem().session.get_config_variable
    files = {key: os.path.expanduser(setting(key)) for key in ("config_file", "credentials_file")}
    # TensorStore prints a line for a file that is missing.
    there = {key: file if os.path.exists(file) else os.devnull for key, file in files.items()}
    return {"type": kind, "profile": setting("profile") or "default", **there}


def _method() -> str:
    """Returns how botocore has found the credentials, in its own words; "none" without any."""
    found = filesystem()
    if found.anon or found.key:  # from fsspec's configuration
        return "anonymous" if found.anon else "fsspec's configuration"
    credentials = asyn.sync(found.loop, found.session.get_credentials)
    return "none" if credentials is None else str(credentials.method)
