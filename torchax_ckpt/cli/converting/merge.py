"""The command ``merge``, which averages the weights of several steps."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

from torchax_ckpt.cli import output
from torchax_ckpt.cli.convert import Exported, Written, chosen_weights, settled, write
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.formats.huggingface.model_folder import assets_at
from torchax_ckpt.formats.importing import import_step
from torchax_ckpt.formats.weights import Weights, in_dtypes_of, weights_at
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location
from torchax_ckpt.stored.averaged_step import AveragedStep
from torchax_ckpt.stored.stored_step import StoredStep

_RUN = "run"


def merge_steps(
    directory: str, out: str, steps: str, weights: str | None, wanted: Exported, *, as_json: bool
) -> int:
    """Runs ``torchax-ckpt merge``; returns the exit code.

    Args:
      directory: the run's directory.
      out: the file or folder to write; for the format ``run``, the new run's directory.
      steps: the numbers of the steps, joined with commas.
      weights: a weight for each step, joined with commas; None for equal weights.
      wanted: what is written and how.
      as_json: whether to print JSON.

    Raises:
      UsageError: the arguments contradict each other.
      StepNotFoundError: there is no such step.
      MismatchError: the steps have different weights.
    """
    if not out:  # probably an unset shell variable, not the working directory
        raise UsageError("merge: OUT: expected a path, found an empty string")
    is_run, path = wanted.format == _RUN, Path(out)
    if not is_run:
        wanted = settled(path, wanted)
    elif wanted.max_shard_size is not None or wanted.config is not None:
        raise UsageError(
            "merge: --max-shard-size needs --format safetensors or hf; --config needs hf or peft"
        )
    factors = _factors(existing(directory), steps, weights)
    # A run in a bucket has no folder on this host.
    scratch = Path(tempfile.gettempdir()) if location.is_bucket(out) else path.parent
    averaged = AveragedStep(factors, scratch)
    chosen = chosen_weights(averaged, wanted)
    _require_alike(averaged, chosen, wanted.at)
    if wanted.dtype is None:
        chosen = in_dtypes_of(chosen, averaged.newest)
    if is_run:
        written = _write_run(averaged, chosen, out, wanted)
    else:
        written = write(averaged, chosen, path, wanted)
    shares = {committed.step: share for committed, share in averaged.weights.items()}
    if averaged.taken:
        output.note(
            f"taken from step {averaged.committed.step}, because integers have no average: "
            f"{', '.join(sorted(averaged.taken))}"
        )
    if as_json:
        output.print_json(
            {
                "steps": list(shares),
                "weights": list(shares.values()),
                "taken_from_newest": sorted(averaged.taken),
                **written.as_json(),
            }
        )
    else:
        written.print(f"the average of steps {', '.join(map(str, shares))}")
    return OK


def _factors(run: RunDirectory, steps: str, weights: str | None) -> dict[CommittedStep, float]:
    """Returns the steps that the arguments name, each with its weight.

    Raises:
      UsageError: the arguments name fewer than two steps, a step twice, or other weights than one
        positive number for each step.
      StepNotFoundError: there is no such step.
    """
    texts = [text.strip() for text in steps.split(",")]
    if not all(text.isdecimal() for text in texts):
        raise UsageError(f"merge: --steps: expected numbers such as 800,900, found {steps!r:.80}")
    numbers = [int(text) for text in texts]
    if len(numbers) < 2 or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"merge: --steps: expected at least two steps, each once, found {steps!r:.80}"
        )
    found = [run.find(number) for number in numbers]
    if weights is None:
        return dict.fromkeys(found, 1.0)
    try:
        factors = [float(text) for text in weights.split(",")]
    except ValueError:
        factors = []
    if len(factors) != len(numbers) or not all(f > 0 and math.isfinite(f) for f in factors):
        raise UsageError(
            f"merge: --weights: expected {len(numbers)} positive numbers, one for each step, found "
            f"{weights!r:.80}. Leave a step of weight 0 out of --steps"
        )
    return dict(zip(found, factors, strict=True))


def _require_alike(averaged: AveragedStep, weights: Weights, at: str | None) -> None:
    """Raises MismatchError unless all steps have the same weights, with the same ties."""
    averaged.require_alike(leaf.name for leaf in weights.leaves.values())
    for committed in averaged.weights:
        found = weights_at(StoredStep(committed), at)
        names = {leaf.name for leaf in found.leaves.values()}
        if more := names - {leaf.name for leaf in weights.leaves.values()}:
            raise MismatchError(
                f"step {committed.step} has weights that step {averaged.committed.step} lacks: "
                f"{', '.join(sorted(more)[:10])}. Leave this step out",
                unexpected=sorted(more),
                step=committed.step,
                path=committed.path,
            )
        if found.ties != weights.ties:
            raise MismatchError(
                f"step {committed.step}: expected the ties of step {averaged.committed.step}, "
                f"{dict(weights.ties)}, found {dict(found.ties)}. Leave this step out",
                step=committed.step,
                path=committed.path,
            )


def _write_run(averaged: AveragedStep, weights: Weights, out: str, wanted: Exported) -> Written:
    """Writes the averages as step 0 of a new run."""
    committed = import_step(
        averaged,
        weights,
        out,
        imported=[f"step {c.step}, weight {share:.6g}" for c, share in averaged.weights.items()],
        scratch=averaged.scratch,
        extra_from=averaged.newest,
        at=wanted.at,
        assets=assets_at(averaged, wanted.at),
        options=CheckpointOptions(max_host_bytes=wanted.max_bytes),
    )
    present = StoredStep(committed).leaves
    left_out = tuple(name for name in weights.left_out if name not in present)
    weights = dataclasses.replace(weights, left_out=left_out)
    return Written([committed.path], list(weights.leaves.values()), weights, None)
