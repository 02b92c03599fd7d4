"""Storage of a kind: a disk, or a bucket of an object store.

What must differ between them is in their implementations: how a folder becomes a step, how files of
one step get into another, how a file grows. ``LocalMedium`` says what each method is for.

A file system renames a folder at once. A bucket has objects only; its clients rename one by one. So
on a disk a save writes a folder of any name, whose later name makes it a step; in a bucket it
writes objects under their final names, and the commit mark, the object that is written last, makes
them a step. A bucket's server may carry out a request long after the client gave up on the answer,
and a stalled writer that lost its lease may go on writing. There a deletion therefore removes only
the exact object that was examined, and a program writes no two saves under one name.

A plain store can only be a mirror. It is used like a bucket, but no request has conditions.
"""

from __future__ import annotations

from etils import epath

from torchax_ckpt.storage.medium import location, plain_store
from torchax_ckpt.storage.medium.bucket_medium import BucketMedium, PlainMedium
from torchax_ckpt.storage.medium.local_medium import LocalMedium
from torchax_ckpt.storage.medium.s3.s3_medium import S3Medium


def of(folder: epath.Path) -> LocalMedium:
    """Returns the storage in which a folder lies, or would lie."""
    if not location.is_url(folder):
        return LocalMedium(folder)
    if plain_store.contains(folder):
        return PlainMedium(folder)
    return S3Medium(folder) if str(folder).startswith("s3://") else BucketMedium(folder)
