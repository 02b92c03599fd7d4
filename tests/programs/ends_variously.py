"""Registers all that runs at an interpreter's end, and runs a statement that ends it.

python ends_variously.py STATEMENT
"""

from __future__ import annotations

import atexit
import os  # noqa: F401 - for the statement
import signal  # noqa: F401 - for the statement
import sys
import threading
import time


class Left:
    def __del__(self) -> None:
        print("module torn down", flush=True)


left = Left()
atexit.register(print, "atexit, first")
atexit.register(print, "atexit, last")
is_ending = threading.Event()
threading._register_atexit(is_ending.set)  # type: ignore[attr-defined]
threading._register_atexit(print, "before threads are waited for")  # type: ignore[attr-defined]
threading.Thread(target=lambda: (is_ending.wait(), print("thread"))).start()
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
sys.stdout.write("not flushed; ")
exec(sys.argv[1])
