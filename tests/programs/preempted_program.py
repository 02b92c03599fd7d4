"""What programs that are told to end by SIGTERM share: policies, words, and long work in C++."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torchax

from torchax_ckpt import CheckpointOptions, policies

torchax.enable_globally()

NEVER = policies.SpecificStepsPolicy(())
PATIENT = CheckpointOptions(preemption_grace_secs=300)  # on a machine with much else to do


def say(*words: Any) -> None:
    # In one piece: another thread's log may come between two.
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def compile_for_long(operations: int) -> None:
    def function(x: Any) -> Any:
        for i in range(operations):
            x = jnp.sin(x @ x + i)
        return x

    lowered = jax.jit(function).lower(jnp.ones((8, 8)))
    say("working")  # from here on in C++
    lowered.compile()


def transfer_for_long(rounds: int) -> None:
    def step(i: Any, x: Any) -> Any:
        return jnp.tanh(x @ x)

    pending = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, step, x))(jnp.ones((400, 400)))
    say("working")
    np.asarray(pending)


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3, step)}
