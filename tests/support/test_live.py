"""A program in a live group cannot tell what ran before it, and a failure is its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import live
from support.live import Groups

PID = "import os; from processes_program import report; report(pid=os.getpid())"
FAILING = {
    "it fails": ("1 / 0", "ZeroDivisionError"),
    "it exits": ("import sys; sys.exit(0)", "SystemExit"),
    "it dies": ("import os; os._exit(3)", "a process has ended"),
    "it hangs": ("import time; time.sleep(60)", "Timeout .*line 1 in <module>"),
    "a thread": (
        "import threading; threading.Thread(target=threading.Event().wait, name='t').start()",
        "leaves behind: thread t",
    ),
    "a pool": (
        "import sys; from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "sys.kept = Pool(); sys.kept.submit(int).result()",
        "leaves behind: thread ThreadPoolExecutor",
    ),
    "a name": (
        "from torchax_ckpt.runtime import stages; stages.stage = None",
        r"leaves behind: torchax_ckpt\.runtime\.stages\.stage",
    ),
    "a method": (
        "from torchax_ckpt.runtime.background import Task; Task.start = Task.cancel",
        r"leaves behind: torchax_ckpt\.runtime\.background\.Task\.start",
    ),
    "a handler": ("import signal; signal.signal(15, print)", "leaves behind: handler of signal 15"),
    "a variable": ("import os; os.environ['X'] = '1'", "leaves behind: environment"),
}


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with Groups() as groups:
        yield groups


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILING)
def test_a_failure_and_what_is_left_behind_end_the_group_and_no_other_program(
    what: str, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, message = FAILING[what]
    [[first]] = groups.run(PID, 1)
    assert groups.run(PID, 1) == [[first]]
    if what == "it hangs":
        monkeypatch.setattr(live, "DEADLINE_SECS", 1)
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        groups.run(program, 1)
    monkeypatch.undo()
    [[after]] = groups.run(PID, 1)
    assert after != first


@pytest.mark.slow
def test_each_program_gets_a_new_group_if_asked_for() -> None:
    with Groups(is_new=True) as groups:
        [[first]], [[second]] = groups.run(PID, 1), groups.run(PID, 1)
    assert first != second


@pytest.mark.slow
def test_a_failure_of_one_process_does_not_wait_for_the_others(groups: Groups) -> None:
    program = """
        from jax.experimental.multihost_utils import sync_global_devices
        from processes_program import INDEX
        assert INDEX == 0, "only one comes here"
        sync_global_devices("never")
    """
    with pytest.raises(AssertionError, match="(?s)process 1: .*only one comes here"):
        groups.run(program, 2)


@pytest.mark.slow
def test_what_may_be_left_is_gone_before_the_next_program(groups: Groups, tmp_path: Path) -> None:
    program = """
        import sys, warnings
        import torch, torchax
        from processes_program import patch, report
        from support.stages import at, die
        from torchax_ckpt import TorchaxCheckpointer
        from torchax_ckpt.runtime import stages

        report(
            observers=len(stages.observers), modes=torch._C._len_torch_function_stack(),
            is_patched=stages.stage is None, arguments=sys.argv[4:],
            left=[name for name in ("reuse_on_processes", "ckpt")
                  if name in sys.modules or name in globals()])
        import reuse_on_processes  # as its settings say
        with TorchaxCheckpointer(sys.argv[4]) as ckpt:
            ckpt.save(1, state={}, force=True)
        warnings.simplefilter("ignore")
        torchax.enable_globally()
        at("commit", die)
        patch(stages, "stage", None)
    """
    for name in ("one", "two"):
        place = str(tmp_path / name)
        nothing = {"observers": 0, "modes": 0, "is_patched": False, "left": []}
        assert groups.run(program, 1, place) == [[{**nothing, "arguments": [place]}]]
