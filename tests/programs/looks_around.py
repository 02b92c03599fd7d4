"""Prints as JSON what a program finds: arguments, environment, files, signals, settings."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import re
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, cast

import jax
from jax._src import xla_bridge
from support import forked

for module in (*forked.MODULES, "torch._dynamo"):
    importlib.import_module(module)
status = Path("/proc/self/status").read_text()
streams = [cast(Any, stream) for stream in (sys.stdout, sys.stderr)]
settings = cast(Any, jax.config)
before = xla_bridge.backends_are_initialized()
print(
    json.dumps(
        {
            "argv": sys.argv,
            "path": sys.path,
            "main": sorted(vars()),
            "name": __name__,
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "umask": os.umask(0o22),
            "files": sorted(os.listdir("/proc/self/fd")),
            "threads": [len(os.listdir("/proc/self/task")) - before, threading.active_count()],
            "is main": threading.current_thread() is threading.main_thread(),
            "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
            "masks": re.findall(r"(Sig(?:Blk|Ign)):\s+(\w+)", status),
            "wakeup": signal.set_wakeup_fd(-1),
            "faulthandler": faulthandler.is_enabled(),
            "filters": [str(entry) for entry in warnings.filters],
            "collects": [gc.isenabled(), gc.get_threshold()],
            "streams": [
                [s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()]
                for s in streams
            ],
            "backend": before,
            "cache": settings.jax_compilation_cache_dir,
            "least": settings.jax_persistent_cache_min_entry_size_bytes,
            "devices": jax.device_count(),
            "traced": sys.gettrace() is not None,
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
    )
)
