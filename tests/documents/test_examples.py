"""The real examples, in processes of their own that are killed by SIGKILL, and resumed.

Final states are compared by the digest that the examples print: of every bit of all parameters,
buffers and optimizer state.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import random
import re
import signal
import threading
from pathlib import Path

import pytest
from support import PROGRAMS, ROOT
from support.jax_releases import xla_flags
from support.processes import COMPILED_ONCE, Talking, environment

from torchax_ckpt import TorchaxCheckpointer

EXAMPLES = ROOT / "examples"
DIGITS, GPT = EXAMPLES / "train_digits.py", EXAMPLES / "train_gpt.py"
LIGHTNING = EXAMPLES / "train_lightning.py"
LORA, LLAMA = EXAMPLES / "finetune_lora.py", EXAMPLES / "pretrain_hf.py"
ENDLESS = "1000000"


@pytest.fixture
def rng() -> random.Random:
    """Another seed in each run of the tests; it is shown with a failure, and can be given."""
    name = "TORCHAX_CKPT_TEST_SEED"
    seed = int(os.environ.get(name, random.SystemRandom().randrange(2**32)))
    print(f"{name}={seed}")
    return random.Random(seed)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a process ended, and what it printed."""

    returncode: int
    output: str

    @property
    def digest(self) -> str:
        """Of the final state; the process must have ended well."""
        assert self.returncode == 0, self.output
        return self._line("final state: ")

    @property
    def resumed(self) -> int:
        """The step it went on from; it must have found one."""
        return int(self._line("resumed: step "))

    def _line(self, start: str) -> str:
        found = re.search(f"^{start}(.+)$", self.output, re.MULTILINE)
        assert found, f"no line begins with {start!r}:\n{self.output}"
        return found[1]


def start(*command: object, fresh: bool = False) -> Talking:
    # With no devices given, as a user starts it: the example sees to them. But the collectives of
    # some need more patience on a busy machine.
    variables = {**COMPILED_ONCE, "PYTHONUNBUFFERED": "1"}
    if {LORA, LLAMA, GPT} & {*command}:
        variables["XLA_FLAGS"] = xla_flags(8)
    env = environment(None, variables)
    # Lightning writes its lines as they are only if it is imported before Orbax's logging.
    return Talking(*map(str, command), env=env, fresh=fresh or LIGHTNING in command)


def run(*command: object) -> Outcome:
    with start(*command) as program:
        watchdog = threading.Timer(200, program.process.kill)
        watchdog.start()
        output = program.lines.read()
        watchdog.cancel()
        return Outcome(program.process.wait(60), output)


def train(example: Path, directory: Path, *options: object) -> Outcome:
    return run(example, "--directory", directory, *options)


def crash(example: Path, directory: Path, step: int, *options: object) -> None:
    outcome = train(example, directory, "--crash-at", step, "--steps", ENDLESS, *options)
    assert outcome.returncode == -signal.SIGKILL, outcome.output


def latest_step(directory: Path) -> int:
    step = TorchaxCheckpointer(directory).latest_step()
    assert step is not None, f"nothing was saved in {directory}"
    return step


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "total"),
    [(DIGITS, ("--steps", 60)), (GPT, ("--steps", 30)), (LIGHTNING, ("--epochs", 3))],
)
def test_an_example_killed_and_resumed_ends_on_the_same_bits(
    example: Path, total: tuple[str, int], tmp_path: Path, rng: random.Random
) -> None:
    uninterrupted = train(example, tmp_path / "uninterrupted", *total).digest
    directory = tmp_path / "killed"
    killed = train(example, directory, *total, "--crash-at", rng.randrange(20, 30))
    assert killed.returncode == -signal.SIGKILL, killed.output
    saved = latest_step(directory)
    resumed = train(example, directory, *total, "--seed", 1)
    assert re.search(f"^resumed: step {saved}\\b", resumed.output, re.MULTILINE), resumed.output
    assert resumed.digest == uninterrupted
    if example is GPT:
        # Restored on other shardings, with nothing left to train, it is the state that was saved.
        restored = train(GPT, directory, *total, "--devices", 4)
        assert (restored.resumed, restored.digest) == (30, uninterrupted)


@pytest.mark.slow
def test_lora_killed_and_resumed_publishes_the_same_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    monkeypatch.chdir(tmp_path)  # where it makes its base
    uninterrupted = train(LORA, tmp_path / "uninterrupted", "--steps", 20)
    directory = tmp_path / "killed"
    crash_at = rng.randrange(12, 20)
    crash(LORA, directory, crash_at)
    resumed = train(LORA, directory, "--steps", 20, "--seed", 1)
    assert 0 < resumed.resumed <= crash_at
    assert resumed.digest == uninterrupted.digest
    folders = [tmp_path / f"{name}-adapters" / "step-20" for name in ("uninterrupted", "killed")]
    ours, theirs = ({p.name: p.read_bytes() for p in f.iterdir()} for f in folders)
    assert ours == theirs
    assert ours.keys() == {"adapter_config.json", "adapter_model.safetensors", "digests.json"}


@pytest.mark.slow
def test_a_llama_of_eight_devices_is_resumed_on_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    on_8 = train(LLAMA, directory, "--steps", 6)
    on_4 = train(LLAMA, directory, "--steps", 6, "--devices", 4)
    assert on_4.resumed == 6
    assert on_4.digest == on_8.digest


@pytest.mark.slow
def test_each_step_has_its_own_dropout_mask(tmp_path: Path) -> None:
    # Were the key a constant of the compiled step, it would not matter what later steps draw.
    outcome = run(PROGRAMS / "usual_and_one_key.py", DIGITS, tmp_path)
    assert outcome.returncode == 0, outcome.output
    usual, one_key = re.findall("^final state: (.+)$", outcome.output, re.MULTILINE)
    assert usual != one_key


@pytest.mark.slow
def test_demo_finds_the_resumed_run_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it writes to .demo
    outcome = run(EXAMPLES / "demo.py")
    assert outcome.returncode == 0, outcome.output
    assert re.search("^  resumed: step [1-9]", outcome.output, re.MULTILINE), outcome.output
    assert outcome.output.splitlines()[-1].startswith("IDENTICAL"), outcome.output


@pytest.mark.slow
def test_a_run_goes_on_in_native_pytorch_and_is_taken_back(tmp_path: Path) -> None:
    native, out = EXAMPLES / "continue_native.py", tmp_path / "native"
    trained = train(GPT, tmp_path / "run", "--steps", 40)
    assert trained.returncode == 0, trained.output
    outcome = train(native, tmp_path / "run", "--out", out, "--steps", 30)
    assert "continues after 40 steps" in outcome.output, outcome.output
    first, *_, last = map(float, re.findall(r"loss ([0-9.]+)", outcome.output))
    assert last < first, outcome.output
    taken = run(native, "--take-back", out)
    (loss,) = map(float, re.findall(r"taken back: loss ([0-9.]+)", taken.output))
    assert loss < first, taken.output


@pytest.mark.slow
@pytest.mark.long  # of four runs at once, three hung while saves did not wait for steps in flight
@pytest.mark.timeout(400)
def test_on_a_busy_machine_no_run_on_simulated_devices_hangs(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(train, GPT, tmp_path / str(n), "--steps", 40) for n in range(4)]
    for number, outcome in enumerate(done.result() for done in runs):
        assert outcome.returncode == 0, outcome.output
        assert latest_step(tmp_path / str(number)) == 40
