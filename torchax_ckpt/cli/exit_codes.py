"""The exit codes of the commands of ``torchax-ckpt``, and which error leads to which code."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    LeaseError,
    OutOfMemoryError,
)

OK = 0
FOUND = 1
"""The command found damage or a difference, or that a state does not fit."""
USAGE = 2
UNAVAILABLE = 3
FAILED = 4
"""An unexpected error. Python itself would exit with 1, which means FOUND here."""
INTERRUPTED = 130
"""Ctrl-C. As in shells, the code is 128 plus the signal's number."""
TERMINATED = 143
"""SIGTERM before the command had finished."""

EPILOG = (
    "Exit codes: 0 success; 1 the command found damage or a difference, or that a state does not "
    "fit; 2 wrong usage (a directory, step or option that does not exist); 3 a read or write is "
    "impossible at the moment (permission, network, a full disk, too little memory, the lease of "
    "another program, or an output that exists already); 4 a defect in the command itself, with a "
    "traceback; 130 interrupted by Ctrl-C; 143 ended by SIGTERM before it had finished."
)


class UsageError(Exception):
    """The arguments of a command are wrong; the message says why."""


def code_of(error: BaseException) -> int:
    """Returns the exit code of a command that failed with ``error``."""
    if isinstance(error, CorruptCheckpointError):
        return FOUND
    if isinstance(error, (DirectoryError, LeaseError, OutOfMemoryError)):
        return UNAVAILABLE
    if isinstance(error, (CheckpointError, UsageError)):
        return USAGE
    return UNAVAILABLE


def with_exit_code(command: Callable[..., int]) -> Callable[..., None]:
    """Makes the program exit with the code that the command returns, or with its error's code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        import typer

        try:
            code = command(*args, **kwargs)
        except BrokenPipeError:  # `torchax-ckpt show ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (CheckpointError, UsageError, OSError, MemoryError) as error:
            message = str(error) or type(error).__name__
            print("torchax-ckpt: " + " ".join(message.split()), file=sys.stderr)
            raise typer.Exit(code_of(error)) from None
        except Exception:
            traceback.print_exc()
            raise typer.Exit(FAILED) from None
        raise typer.Exit(code)

    return run
