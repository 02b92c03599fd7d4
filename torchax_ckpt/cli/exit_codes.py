"""Owns the exit codes, and which error ends in which."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    LeaseError,
    MismatchError,
    OutOfMemoryError,
)

OK = 0
FOUND = 1
"""The command has found what it looks for: damage, a difference."""
USAGE = 2
UNAVAILABLE = 3
FAILED = 4
"""Nothing that was foreseen: Python's own 1 would say that something was found."""
INTERRUPTED = 130
"""By Ctrl-C: as shells have it, 128 and the signal's number."""

EPILOG = (
    "Exit codes: 0 all is well; 1 damage or a difference was found; 2 the command was used wrongly "
    "(a directory, step or option that does not exist); 3 something cannot be read or written now "
    "(permission, network, a full disk, too little memory, another program holds the lease, or "
    "what would be overwritten is there already); 4 an error in the command itself, with a "
    "traceback; 130 it was interrupted (Ctrl-C)."
)

F = TypeVar("F", bound=Callable[..., Any])


class UsageError(Exception):
    """The command cannot do what was asked for; says why."""


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, (CorruptCheckpointError, MismatchError)):
        return FOUND
    if isinstance(error, (DirectoryError, LeaseError, OutOfMemoryError)):
        return UNAVAILABLE
    if isinstance(error, (CheckpointError, UsageError)):
        return USAGE
    return UNAVAILABLE


def ends_well(command: F) -> F:
    """Has a command end with one line on stderr and an exit code, where an error was foreseen."""

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
            said = str(error) or type(error).__name__
            print("torchax-ckpt: " + " ".join(said.split()), file=sys.stderr)
            raise typer.Exit(code_of(error)) from None
        except Exception:
            traceback.print_exc()
            raise typer.Exit(FAILED) from None
        raise typer.Exit(code or OK)

    return run  # type: ignore[return-value]
