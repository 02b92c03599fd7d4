"""The command line: what it prints for people and machines, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support import TESTS
from support.commands import run, run_json, run_main
from support.damage import damage
from support.processes import run_python
from support.reusing import Run
from support.steps import save_states
from typer.testing import CliRunner

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes, output, show
from torchax_ckpt.cli.app import COMMANDS, app
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.storage.directory import run_directory
from torchax_ckpt.storage.directory.committed_step import VERIFIED, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored import stored_step


def state(step: int) -> dict[str, Any]:
    values = np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)
    return {"w": values, "layers": [{"b": np.full(3, i)} for i in range(3)], "n": np.float32(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps; no test changes them."""
    metrics = {1: {"loss": 1.0}, 2: {"loss": 0.5}}
    run = tmp_path_factory.mktemp("saved") / "run"
    return save_states(
        run, {1: state(1), 2: state(2)}, metrics, preservation_policy=policies.LatestN(3)
    )


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture
def unchanged(saved: Path) -> Iterator[None]:
    before = {p: p.stat().st_mtime_ns for p in sorted(saved.rglob("*"))}
    yield
    assert {p: p.stat().st_mtime_ns for p in sorted(saved.rglob("*"))} == before


# --- how it starts and ends ---


def test_commands_that_compute_nothing_import_neither_torch_nor_jax(
    copy: Path, tmp_path: Path
) -> None:
    program = """
        import runpy, sys
        run, out = sys.argv[1:]
        for words in (
            ["--version"],
            ["ls", run], ["show", run], ["verify", run, "--all"], ["diff", run, run],
            ["report", run, out + "/page.html"], ["prune", run, "--policy", "LatestN(1)"],
            ["copy", run, out + "/copied"],
            ["export", run, out + "/w.safetensors", "--at", "state"],
            ["plan", "--params", "70B", "--blocking", "1s", "--durable", "2min"],
        ):
            sys.argv[1:] = words
            try:
                runpy.run_module("torchax_ckpt", run_name="__main__")
            except SystemExit as end:
                assert end.code == 0, words
            assert not {"jax", "orbax", "torch", "torchax"} & set(sys.modules), words
    """
    # As on a TPU host, where the training holds the TPU.
    result = run_python(program, str(copy), str(tmp_path), env={"JAX_PLATFORMS": "tpu"}, fresh=True)
    assert result.stdout.startswith("torchax-ckpt ")
    assert "state/w" in result.stdout


def test_shells_complete_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "torchax-ckpt ver"
    for name, value in {
        "COMP_WORDS": typed,
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():
        monkeypatch.setenv(name, value)
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("_TORCHAX_CKPT_COMPLETE", f"complete_{shell}")
        assert run_main(monkeypatch) == exit_codes.OK
        assert "verify" in capsys.readouterr().out, shell


def test_what_cannot_be_imported_is_said_and_leaves_the_help() -> None:
    """In one process, whose exit code is that of a command that cannot be imported."""
    program = """
        import sys
        from torchax_ckpt.__main__ import main
        for missing, word in (("safetensors", "ls"), ("typer", "ls"), ("tensorstore", "--help")):
            sys.modules[missing], sys.argv[1:] = None, [word]
            try:
                main()
            except SystemExit as end:
                print("ends:", missing, end.code)
            del sys.modules[missing]
        sys.modules["tensorstore"], sys.argv[1:] = None, ["verify", "."]
        main()
    """
    result = run_python(program, check=False, fresh=True)
    ends = [line for line in result.stdout.splitlines() if line.startswith("ends:")]
    assert ends == ["ends: safetensors 2", "ends: typer 2", "ends: tensorstore 0"]
    assert "verify" in result.stdout
    assert result.returncode == exit_codes.FAILED
    first, second, *rest = result.stderr.splitlines()
    assert first == second == 'torchax-ckpt needs its extra: pip install "torchax-ckpt[cli]"'
    assert "tensorstore" in rest[-1]


def test_every_exit_code_is_stated_in_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in vars(exit_codes).items():
        if name.isupper() and isinstance(code, int):
            assert re.search(rf"\b{code} [a-z]", exit_codes.EPILOG)
    for command in COMMANDS:  # one page says it once
        assert "Exit codes" not in run(command, "--help")
    assert "Exit codes: 0" in run("--help")
    monkeypatch.setenv("COLUMNS", "200")
    assert "'transformer.h.*=layers.*'" in run("export", "--help")


def test_steps_have_names_wherever_a_step_may_stand(copy: Path, tmp_path: Path) -> None:
    for name, step in (("latest", 2), ("best:loss", 2), ("best:loss:max", 1), ("1", 1)):
        assert run_json("show", str(copy), name)["step"] == step
        assert run_json("show", f"{copy}/{name}")["step"] == step
        assert run_json("show", f"{copy}/{name}/")["step"] == step
        assert run_json("diff", f"{copy}/{name}", f"{copy}/{step}")["identical"] is True
        (verified,) = run_json("verify", str(copy), name)["steps"]
        assert verified["step"] == step
        out = tmp_path / f"{name}.pt"
        run("export", str(copy), name, str(out), "--at", "state")
        assert out.exists()
    assert run_json("copy", f"{copy}/best:loss:max", str(tmp_path / "kept"))["steps"] == [1]
    copy.rename(copy.with_name("latest"))  # a run may be called like that
    assert run_json("show", str(copy.with_name("latest")), "1")["step"] == 1


@pytest.mark.parametrize("name", ["latest", "best:loss", "2"])
def test_a_name_of_a_step_is_not_taken_for_a_path_to_write(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    for command in ("export", "copy", "report"):
        said = run(command, str(copy), name, code=exit_codes.USAGE)
        assert f"give DIRECTORY/{name} to choose the step, or ./{name} to write" in said
    assert not Path(name).exists()
    run("copy", str(copy), f"./{name}")
    assert Path(name).exists()


def test_verify_reads_several_steps_each_once(copy: Path) -> None:
    results = run_json("verify", str(copy), "1", "latest", "2")["steps"]
    assert [result["step"] for result in results] == [1, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ls", "{tmp}/nowhere"), "nowhere: no such directory"),
        (("show", "{saved}/1/commit_success.txt"), "is not a directory"),
        (("ls", "{saved}/1"), "expected the directory of a run, found its step 1; the run is"),
        (("show", "{saved}/7"), "no checkpoint at step 7; there are: 1, 2"),
        (("show", "{saved}/1", "1"), "found its step 1"),
        (("verify", "{tmp}", "--all"), "there are no checkpoints"),
        (("show", "{saved}", "7"), "no checkpoint at step 7; there are: 1, 2"),
        (("show", "{tmp}"), "there are no checkpoints"),
        (("verify", "{saved}", "1", "--all"), "not both"),
        (("show", "{saved}", "-1"), "-1"),
        (("ls",), "DIRECTORY"),
    ],
)
def test_wrong_use_is_told_and_ends_with_2(
    args: tuple[str, ...], message: str, saved: Path, tmp_path: Path
) -> None:
    filled = [arg.format(tmp=tmp_path, saved=saved) for arg in args]
    assert message in run(*filled, code=exit_codes.USAGE)


def test_what_cannot_be_read_now_ends_with_3_and_errors_of_the_command_with_1(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> Any:
        raise DirectoryError("cannot read it:\nInput/output error")

    monkeypatch.setattr(run_directory.RunDirectory, "steps", fail)
    said = run("ls", saved, code=exit_codes.UNAVAILABLE)
    assert said == "torchax-ckpt: cannot read it: Input/output error\n"
    monkeypatch.setattr(run_directory.RunDirectory, "steps", lambda self: 1 / 0)
    result = CliRunner().invoke(app, ["ls", str(saved)])
    assert result.exit_code == exit_codes.FAILED
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_command_with_130_and_without_a_word(saved: Path) -> None:
    program = """
        import os, signal, sys, time
        from torchax_ckpt.__main__ import main
        from torchax_ckpt.stored.stored_step import StoredStep
        def interrupted(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        StoredStep.verify = interrupted
        sys.argv[1:] = ["verify", sys.argv[1]]
        main()
    """
    result = run_python(program, str(saved), check=False, fresh=True)
    assert (result.returncode, result.stdout, result.stderr) == (exit_codes.INTERRUPTED, "", "")


@pytest.mark.slow
def test_ctrl_c_in_a_callback_of_the_collector_is_not_lost() -> None:
    program = """
        import gc, os, signal, sys
        from torchax_ckpt.__main__ import main
        def callback(phase, info):
            gc.callbacks.remove(callback)
            os.kill(os.getpid(), signal.SIGINT)
            [None for _ in range(1000)]
        class Collecting:
            def find_spec(self, name, path, target=None):
                if name == "torchax_ckpt.cli.app":
                    gc.callbacks.append(callback)
                    gc.collect()
        sys.meta_path.insert(0, Collecting())
        main()
    """
    result = run_python(program, "--version", check=False, fresh=True)
    assert (result.returncode, result.stdout, result.stderr) == (exit_codes.INTERRUPTED, "", "")


# --- ls ---


@pytest.mark.usefixtures("unchanged")
def test_ls_lists_the_steps(saved: Path, tmp_path: Path) -> None:
    listed = run_json("ls", saved)
    assert listed["directory"] == str(saved)
    assert [step["step"] for step in listed["steps"]] == [1, 2]
    assert [step["metrics"] for step in listed["steps"]] == [{"loss": 1.0}, {"loss": 0.5}]
    assert not any(step["verified"] for step in listed["steps"])
    files = [p for p in (saved / "2").rglob("*") if p.is_file()]
    assert listed["steps"][1]["size_bytes"] == sum(p.stat().st_size for p in files)
    head, _, newest, *_ = run("ls", saved).splitlines()
    assert " ".join(head.split()) == "step age size shared verified kept by metrics"
    row = r" *2 +\d+ s +[\d.]+ kB +0 B +no +LatestN\(3\), newest +loss=0.5 *"
    assert re.fullmatch(row, newest)
    assert run_json("ls", tmp_path)["steps"] == []
    assert "no checkpoints" in run("ls", tmp_path)


def test_ls_says_what_cp_does_to_shared_bytes(directory: Path) -> None:
    with Run(directory) as reusing:
        reusing.save(3)
    assert any(step["shared_bytes"] for step in run_json("ls", directory)["steps"])
    assert "shared bytes count once (cp -r copies them for each step" in run("ls", directory)


def test_ls_names_the_program_that_writes(directory: Path) -> None:
    lease = directory / "lease"
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state(1))
        ckpt.wait_until_finished()
        writer = run_json("ls", directory)["writer"]
        assert (writer["pid"], writer["running"]) == (os.getpid(), True)
        said = run("ls", directory).splitlines()[-1]
        assert re.match(
            rf"a program writes here: host \S+, pid {os.getpid()}, since .* s ago", said
        )
        held = json.loads(lease.read_text())
        copied = shutil.copytree(directory, directory.parent / "copied")
        assert run_json("ls", copied)["writer"] is None  # the program does not write to a copy
    assert run_json("ls", directory)["writer"] is None
    assert "program" not in run("ls", directory)
    ended = {**held, "started": held["started"] - 1, "host": "\x1b[2J[red]"}
    lease.write_text(json.dumps(ended))
    said = run("ls", directory).splitlines()[-1]
    assert said.startswith("the last program did not close the run: host \\x1b[2J[red], pid ")
    elsewhere = {**held, "kernel": "another"}
    for ago_secs, is_running in ((5, True), (500, False)):
        lease.write_text(json.dumps({**elsewhere, "renewed_secs": time.time() - ago_secs}))
        assert run_json("ls", directory)["writer"]["running"] is is_running


def test_ls_watch_lists_again_until_ctrl_c(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails is told, and the next one may succeed; the newest steps are in sight."""
    assert run("ls", copy, "--watch").count("newest") == 1  # no terminal: once
    looks: list[RunDirectory] = []
    steps_of = show.steps_of

    def looked(run: RunDirectory) -> Any:
        looks.append(run)
        if len(looks) == 2:
            raise OSError("stale handle")
        return steps_of(run)

    def sleep(secs: float) -> None:
        assert secs == 2
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(show, "steps_of", looked)
    monkeypatch.setattr(show.time, "sleep", sleep)
    monkeypatch.setattr(output, "is_watched", lambda: True)
    terminal = functools.partial(Console, force_terminal=True, width=200, height=5)
    monkeypatch.setattr(output, "console", terminal)
    result = CliRunner().invoke(app, ["ls", str(copy), "--watch"])
    assert result.exit_code == 0, result.output
    assert len(looks) == 3
    assert "cannot be read now: stale handle" in result.output
    assert "loss=0.5" in result.output
    assert "loss=1" not in result.output


# --- show ---


@pytest.mark.usefixtures("unchanged")
def test_show_lists_every_leaf_or_those_of_a_pattern(saved: Path) -> None:
    shown = run_json("show", saved)
    assert shown["step"] == 2
    assert shown["metrics"] == {"loss": 0.5}
    leaves = {leaf["name"]: leaf for leaf in shown["leaves"]}
    form = {"kind": "numpy", "dtype": "float32", "shape": [64, 64], "num_bytes": 64 * 64 * 4}
    assert leaves["state/w"] == {"name": "state/w", **form, "stack": None, "sharding": None}
    assert leaves["state/layers/1/b"]["stack"] == "state/layers/*/b"
    assert shown["num_bytes"] == sum(leaf["num_bytes"] for leaf in leaves.values())
    text = run("show", saved, 1)
    assert all(name in text for name in leaves)
    assert run("show", f"{saved}/1") == text
    assert run("verify", f"{saved}/1", "--read-only") == run("verify", saved, 1, "--read-only")
    some = ("show", saved, "--filter", "state/layers/*")
    names = [leaf["name"] for leaf in run_json(*some)["leaves"]]
    assert names == [f"state/layers/{i}/b" for i in range(3)]
    assert run(*some).splitlines()[-1] == f"step 2: 3 of {shown['num_leaves']} leaves, 72 B"
    golden = run_json("show", TESTS / "golden/v1/stacked")
    leaves = {leaf["name"]: leaf for leaf in golden["leaves"]}
    assert leaves["state/dtypes/bfloat16"]["sharding"] == "(fsdp) on fsdp=8"
    # In storage it is a row of a stack, whose first dim is no dim of the leaf.
    assert leaves["state/layers/0/w"]["stack"] == "state/layers/*/w"
    assert leaves["state/layers/0/w"]["sharding"] == "(fsdp) on fsdp=8"


def test_a_run_may_have_a_number_for_a_name(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a scheduler's job, among those of others, where nobody may look."""
    copy = copy.rename(copy.with_name("2026"))
    listed = RunDirectory.all_committed

    def permitted(self: RunDirectory, first: int = 0) -> list[CommittedStep]:
        if self.path == copy.parent:
            raise DirectoryError("permission denied", path=self.path)
        return listed(self, first)

    monkeypatch.setattr(RunDirectory, "all_committed", permitted)
    assert run_json("show", copy)["step"] == 2
    assert "no such directory" in run("show", copy.parent / "1", code=exit_codes.USAGE)
    monkeypatch.undo()
    beside = copy.with_name("run")  # where 2026 would be a step, were it one
    shutil.move(copy, beside)
    shutil.copytree(beside, beside / "2026")
    assert run_json("show", beside / "2026")["directory"] == str(beside / "2026")


@pytest.mark.slow
def test_at_a_terminal_show_draws_a_tree() -> None:
    golden = TESTS / "golden/v1/stacked"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 120))
    command = [sys.executable, "-m", "torchax_ckpt", "show", str(golden)]
    with subprocess.Popen(command, stdout=theirs) as program:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while more := os.read(ours, 4096):
                said += more
        assert program.wait(60) == 0
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).splitlines()
    assert lines[:4] == [
        "state",
        "├── layers",
        "│   ├── 0",
        "│   │   └── w  float32[8, 4]  128 B  (fsdp) on fsdp=8  in state/layers/*/w",
    ]
    leaves = run_json("show", golden)["leaves"]
    assert len([line for line in lines if re.search(r"\]  \d", line)]) == len(leaves)
    assert lines[-1] == f"step 3: {len(leaves)} leaves, 8.98 kB"


def test_names_cannot_command_a_terminal(directory: Path) -> None:
    text = run("show", save_states(directory, {1: {"[red]\u202ename": np.zeros(1)}}))
    assert "state/[red]\\u202ename" in text


# --- verify ---


def test_verify_marks_what_is_well(copy: Path) -> None:
    assert run_json("verify", copy, "--read-only")["steps"][0]["marked"] is False
    assert not (copy / "2" / VERIFIED).exists()
    num_bytes = run_json("show", copy)["num_bytes"]
    expected = {"step": 2, "ok": True, "num_bytes": num_bytes, "marked": True}
    assert run_json("verify", copy)["steps"] == [expected]
    assert (copy / "2" / VERIFIED).exists()
    assert not (copy / "1" / VERIFIED).exists()
    assert [s["verified"] for s in run_json("ls", copy)["steps"]] == [False, True]


def test_verify_finds_damage_and_names_it(copy: Path) -> None:
    file, _ = damage(copy / "1", state(1)["w"].tobytes()[:64])
    result = run_json("verify", copy, "--all", code=exit_codes.FOUND)
    first, second = result["steps"]
    assert (first["step"], first["ok"], first["leaf"]) == (1, False, "state/w")
    assert str(file) in first["error"]
    assert (second["step"], second["ok"]) == (2, True)
    assert not (copy / "1" / VERIFIED).exists()
    assert (copy / "2" / VERIFIED).exists()
    result = CliRunner().invoke(app, ["verify", str(copy), "1"])
    assert (result.exit_code, result.stderr.count("\n")) == (exit_codes.FOUND, 1)
    assert "state/w" in result.stderr
    damage(copy / "2", b'"format"')
    assert run_json("verify", copy, code=exit_codes.FOUND)["steps"][0]["ok"] is False


def test_a_host_that_is_too_small_is_no_finding(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "host_memory_bytes", lambda: 100)
    words = ("export", copy, "2", tmp_path / "out.pt", "--format", "pt", "--at", "state")
    assert "that this host can hold, 100 bytes" in run(*words, code=exit_codes.UNAVAILABLE)
    assert not (tmp_path / "out.pt").exists()


READING = {
    "verify": ("verify", "{run}", "2"),
    "diff": ("diff", "{run}/1", "{run}/2"),
    "export": ("export", "{run}", "2", "{tmp}/out.safetensors", "--at", "state"),
    "export-pt": ("export", "{run}", "2", "{tmp}/out.pt", "--format", "pt", "--at", "state"),
    "copy": ("copy", "{run}/2", "{tmp}/other"),
}


@pytest.mark.parametrize(
    ("command", "when"),
    [("show", "before"), *((name, when) for name in READING for when in ("before", "after"))],
)
def test_a_step_that_is_deleted_while_it_is_read_is_not_called_damaged(
    command: str, when: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_when_read(2, when, monkeypatch)
    words = READING.get(command, (command, "{run}", "2"))
    filled = [word.format(run=copy, tmp=copy.parent) for word in words]
    assert "step 2 was deleted meanwhile" in run(*filled, code=exit_codes.USAGE)
    assert {path.name for path in copy.parent.iterdir()} <= {"copy", "other"}
    assert not list(copy.parent.glob("other/*2*"))  # nothing is left of a copy


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("gone", [1, 2])
def test_commands_for_all_steps_go_on_where_one_is_deleted_meanwhile(
    gone: int, when: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = shutil.copytree(copy, tmp_path / "beside")
    delete_when_read(gone, when, monkeypatch)
    other = tmp_path / "other"
    for words in (["verify", str(beside), "--all"], ["copy", str(copy), str(other)]):
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        steps = json.loads(result.stdout)["steps"]
        assert [s["step"] if isinstance(s, dict) else s for s in steps] == [3 - gone]
        assert f"step {gone} was deleted meanwhile" in result.stderr
    monkeypatch.undo()
    assert run_json("verify", other)["steps"][0]["step"] == 3 - gone
    assert [s["step"] for s in run_json("ls", other)["steps"]] == [3 - gone]
    assert not list(other.glob(f"*{gone}-*"))  # nothing is left of the copy


def delete_when_read(step: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a training pruned it, before or after its manifest is read."""
    parse = stored_step.parse_manifest

    def parse_and_delete(committed: Any) -> Any:
        if when == "before" and committed.step == step:
            shutil.rmtree(committed.path)
        manifest = parse(committed)
        if committed.step == step:
            shutil.rmtree(committed.path)
        return manifest

    monkeypatch.setattr(stored_step, "parse_manifest", parse_and_delete)


def test_verify_says_when_a_step_cannot_be_marked(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*path: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("torchax_ckpt.storage.medium.local_medium.LocalMedium.make_file", refuse)
    result = CliRunner().invoke(app, ["verify", str(copy), "--json"])
    assert result.exit_code == exit_codes.OK
    assert json.loads(result.stdout)["steps"][0]["marked"] is False
    assert "cannot be marked" in result.stderr
