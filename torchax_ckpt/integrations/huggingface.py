"""Publishes finished steps from inside a training program, as folders that transformers loads."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Literal

import jax

from torchax_ckpt.errors import SaveTimeoutError
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.follower import Follower
from torchax_ckpt.runtime.background import Task, finish_at_exit

if TYPE_CHECKING:
    from torchax_ckpt import TorchaxCheckpointer

__all__ = ["Publisher"]

logger = logging.getLogger(__name__)

# How long ``close`` waits for a save; the checkpointer may wait longer when it closes.
_MAX_SAVE_SECS = 600.0


class Publisher:
    """Publishes steps of a run as folders, on a background thread, once they are durable::

        with TorchaxCheckpointer("runs/a") as ckpt, Publisher(ckpt, "published", every=1000):
            ckpt.attach(model, optimizer, tokenizer=tokenizer)
            for step in ckpt.steps(total):
                ...train...

    A reader takes the newest folder, which is always complete::

        folder = Path("published", Path("published/latest").read_text().strip())
        model = AutoModelForCausalLM.from_pretrained(folder)

    ``torchax_ckpt.publishing.Reader`` instead reads the tensors that changed, also from a bucket.
    ``torchax-ckpt follow`` does the same as a program of its own, on any host. The thread reads the
    steps from storage and uses no device. A failure is logged as a warning, and the thread tries
    again; nothing is raised into the training. Only process 0 of a run publishes: create the
    Publisher after ``jax.distributed.initialize``.

    Args:
      run: the checkpointer, or the directory of the run. With a directory, open the Publisher
        before the checkpointer: it is then closed later, and publishes the last step.
      out: a folder, ``gs://bucket/prefix`` or ``s3://bucket/prefix``: new, empty, or one to which
        steps of this run were published before, in this format. It gets the folders ``step-N``,
        and the text file ``latest``, which names the newest.
      format: "hf" for folders that transformers and vLLM load, with the config and the tokenizer
        that the steps store; "peft" for folders of adapters; "safetensors" for weights alone.
      every: publish the multiples of this number; where a multiple was not saved or is not kept,
        the first kept step after it. Default: 1, the newest step, unless ``best`` is given.
      best: a metric, as ``METRIC``, ``METRIC:min`` or ``METRIC:max``; publish the best step if it
        is better than each published one.
      keep: how many folders to keep, those published last. Others stay for 10 minutes.
      dtype: "bf16", "fp16" or "fp32" to cast floating-point weights; None for no cast.
      at: the key path of the weights in a step; None for the one attached model.
      max_shard_bytes: the most bytes of a file; None for one file. Frozen weights then have files
        of their own, which folders share.

    Raises:
      ValueError, TypeError: an argument cannot work, for example an ``out`` in the run's directory.
      DirectoryError: ``run`` or ``out`` is no path, or has a scheme that is not supported.
    """

    def __init__(
        self,
        run: TorchaxCheckpointer | str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        format: Literal["hf", "peft", "safetensors"] = "hf",
        every: int | None = None,
        best: str | None = None,
        keep: int = 3,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        at: str | None = None,
        max_shard_bytes: int | None = None,
    ) -> None:
        self._checkpointer = None if isinstance(run, (str, os.PathLike)) else run
        self._follower = Follower(
            run if isinstance(run, (str, os.PathLike)) else run.directory,
            out,
            FolderForm(format=format, dtype=dtype, at=at, max_shard_bytes=max_shard_bytes),
            every=every,
            best=best,
            keep=keep,
        )
        if self._checkpointer is not None:
            history = self._checkpointer._run.durable.tier.history
            self._follower.listen_to(lambda: history.branches.committed[-1:])
        self._task: Task | None = None
        if jax.process_index() == 0:
            self._task = Task("publisher", self._run)
            atexit.register(self._exit)
            self._task.start()

    def __repr__(self) -> str:
        return f"<Publisher to {str(self._follower.out)!r}>"

    def close(self) -> None:
        """Publishes the newest finished step, and ends the thread. May be called twice.

        Waits for saves in flight first, for at most 10 minutes, if a checkpointer was given. With
        ``every``, publishes the step even if it is not due yet; with ``best``, only if it is
        better. After a preemption, publishes nothing, because the host has no time left. A failure
        is logged, not raised.
        """
        if self._task is None:
            return
        if self._checkpointer is not None:
            if self._checkpointer.reached_preemption():
                self._follower.aborted.set()
            else:
                try:
                    # wait_until_finished() would take the errors of saves, which the program's next
                    # call of the checkpointer is to raise.
                    self._checkpointer._run.wait(_MAX_SAVE_SECS)
                except SaveTimeoutError as error:
                    text = "%s: publishing the newest durable step without waiting longer: %s"
                    logger.warning(text, self._follower.out, error)
        self._follower.stopped.set()
        self._task.ended.wait()
        atexit.unregister(self._exit)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _exit(self) -> None:
        """Ends the thread with the program, if nobody called ``close``."""
        self._follower.aborted.set()
        self._follower.stopped.set()
        if self._task is not None:
            finish_at_exit(self._task, lambda: f"a folder in {self._follower.out}")

    def _run(self) -> None:
        # Whatever the error is, training goes on.
        for new in self._follower.follow(Exception, publishes_last=True):
            logger.debug("published step %d as %s", new.step, new.path)
        self._follower.close()
