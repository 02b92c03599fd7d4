"""Takes the lease of a directory and forks a child that tries to take, renew and release it.

    python forked_lease.py DIRECTORY

Prints "all is well" at its end.
"""

from __future__ import annotations

import os
import pathlib
import sys

from torchax_ckpt.errors import LeaseError
from torchax_ckpt.storage.directory.lease import Lease

directory = pathlib.Path(sys.argv[1])
directory.mkdir()
lease = Lease(directory)
lease.hold()
child = os.fork()
if child == 0:
    for attempt, expected in (
        (lease, "this process was forked from the process that writes"),
        (Lease(directory), "another program writes to this directory: "),
    ):
        try:
            attempt.hold()
        except LeaseError as error:
            assert expected in str(error) and f"pid {os.getppid()}" in str(error), error
        else:
            os._exit(1)
    lease.renew()
    lease.release()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
lease.hold()
lease.release()
assert list(directory.iterdir()) == []
print("all is well")
