"""Publishes finished steps from inside a training program, as folders that transformers loads."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import jax

from torchax_ckpt.errors import CheckpointError, SaveTimeoutError
from torchax_ckpt.publishing import Best, Every, FolderForm, Follower
from torchax_ckpt.runtime.background import Flag, Task, finish_at_exit

if TYPE_CHECKING:
    from torchax_ckpt import TorchaxCheckpointer

__all__ = ["Publisher"]

logger = logging.getLogger(__name__)


class _ProgramEnds(Exception):  # noqa: N818 - ends a publication from inside; no failure
    """The program ends while a folder is being written."""


class Publisher:
    """Publishes finished steps of a run as folders, on a background thread::

        with TorchaxCheckpointer("runs/a") as ckpt, Publisher(ckpt, "published", every=1000):
            ckpt.attach(model, optimizer, tokenizer=tokenizer)
            for step in ckpt.steps(total):
                ...train...

    A reader takes the newest folder, which is always complete::

        folder = Path("published", Path("published/latest").read_text().strip())
        model = AutoModelForCausalLM.from_pretrained(folder)

    ``torchax-ckpt follow`` does the same as a program of its own, on any host. The thread reads the
    steps from storage, as that program does, and uses no device. A failure is logged as a warning,
    and the thread tries again; nothing is raised into the training. Only process 0 of a run
    publishes: create the Publisher after ``jax.distributed.initialize``.

    Args:
      run: the checkpointer, or the directory of the run. With a directory, open the Publisher
        before the checkpointer: it is then closed later, and publishes the last step.
      out: a folder on this host: new, empty, or one to which steps of this run were published
        before, in this format. It gets the folders ``step-N``, and the text file ``latest``, which
        names the newest.
      format: "hf" for folders that transformers and vLLM load, with the config and the tokenizer
        that the steps store; "peft" for folders of adapters; "safetensors" for weights alone.
      every: publish the newest step once it is this many steps or more past the last published
        one, or past 0. Default: 1, each newest step, unless ``best`` is given.
      best: the name of a metric; publish a step that is better than each published one.
      mode: whether small ("min") or large ("max") values of the metric are good.
      keep: how many folders to keep, those published last.
      grace_secs: how long a folder stays after it is no longer among those to keep.
      poll_secs: seconds from one look at the run's directory to the next.
      dtype: "bf16", "fp16" or "fp32" to cast floating-point weights; None for no cast.
      config: a folder with ``config.json`` and other text files, for steps that store none.
      max_shard_bytes: the largest total size of the tensors in one file; None for one file.
      at: the key path of the weights in a step; None for the one attached model.
      include, exclude: patterns of the names to write, as for ``warm_start``.
      rename: pattern of names in the step -> the names to write.
      max_host_bytes: bound on array data in memory; None for the default.

    Raises:
      ValueError, TypeError: an argument cannot work, for example an ``out`` in the run's directory.
      DirectoryError: ``run`` is no path, or has a scheme that is not supported.
    """

    def __init__(
        self,
        run: TorchaxCheckpointer | str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        format: Literal["hf", "peft", "safetensors"] = "hf",
        every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep: int = 3,
        grace_secs: float = 600.0,
        poll_secs: float = 10.0,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        config: str | os.PathLike[str] | None = None,
        max_shard_bytes: int | None = None,
        at: str | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        max_host_bytes: int | None = None,
    ) -> None:
        if every is not None and best is not None:
            raise ValueError("every and best exclude each other: give one of them")
        if not poll_secs > 0:
            raise ValueError(f"poll_secs: expected a positive number, found {poll_secs!r:.80}")
        self._checkpointer = None if isinstance(run, (str, os.PathLike)) else run
        self._poll_secs = poll_secs
        self._follower = Follower(
            run if isinstance(run, (str, os.PathLike)) else run.directory,
            out,
            Every(1 if every is None else every) if best is None else Best(best, mode),
            FolderForm(
                format=format,
                dtype=dtype,
                config=config,
                max_shard_bytes=max_shard_bytes,
                at=at,
                include=include,
                exclude=exclude,
                rename=rename,
                max_host_bytes=max_host_bytes,
            ),
            keep=keep,
            grace_secs=grace_secs,
            on_skipped=self._report,
            on_bytes=self._go_on,
        )
        self._reported = ""
        self._closing, self._exiting = Flag(), Flag()
        self._task: Task | None = None
        if jax.process_index() == 0:
            self._task = Task("publisher", self._run)
            atexit.register(self._exit)
            self._task.start()

    def close(self) -> None:
        """Publishes the newest finished step, and ends the thread. May be called twice.

        Waits for saves in flight first, if a checkpointer was given. With ``every``, the step is
        published even if it is fewer steps past the last published one; with ``best``, only if it
        is better. If the checkpointer has reached a preemption, nothing more is published, because
        the host has no time left: the program that resumes the run publishes it. Raises nothing
        because of a failure, which is logged.
        """
        if self._task is None:
            return
        if self._checkpointer is not None:
            if self._checkpointer.reached_preemption():
                self._exiting.set()
            else:
                with contextlib.suppress(SaveTimeoutError):
                    # wait_until_finished() would take the errors of saves, which the program's next
                    # call of the checkpointer is to raise.
                    self._checkpointer._tiers.wait()
        self._closing.set()
        self._task.ended.wait()
        atexit.unregister(self._exit)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _exit(self) -> None:
        """Ends the thread with the program, if nobody called ``close``."""
        self._exiting.set()
        self._closing.set()
        if self._task is not None:
            finish_at_exit(self._task, lambda: f"a folder in {self._follower.out}")

    def _run(self) -> None:
        while not self._closing.wait(self._poll_secs):
            self._publish(is_at_end=False)
        self._publish(is_at_end=True)
        self._follower.close()

    def _publish(self, *, is_at_end: bool) -> None:
        if self._exiting.is_set:
            return
        try:
            new = self._follower.publish_due(is_at_end=is_at_end)
        except _ProgramEnds:
            return
        except Exception as error:  # whatever it is, training goes on
            self._report(error)
            return
        self._reported = ""
        if new is not None:
            logger.info("published step %d as %s", new.step, new.path)

    def _report(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text == self._reported or self._exiting.is_set:
            return  # once, not at every look
        self._reported = text
        is_known = isinstance(error, CheckpointError)
        logger.warning("cannot publish to %s: %s", self._follower.out, text, exc_info=not is_known)

    def _go_on(self, num_bytes: int) -> None:
        if self._exiting.is_set:
            raise _ProgramEnds
