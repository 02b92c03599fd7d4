"""The assets of a step: written, read, verified, copied and compared like the rest of the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orbax.checkpoint import v1 as ocp
from support import PROGRAMS
from support.commands import run, run_json
from support.damage import edit_json, flip_bit
from support.described import Described, Tokenizer
from support.live import Together
from support.stages import at

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import CorruptCheckpointError, SaveError
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep


def assets_of(directory: Path, step: int = 1) -> dict[str, str]:
    return StoredStep(RunDirectory(directory, read_only=True).candidates(step)[-1]).read_assets()


def save(directory: Path, step: int = 1, **settings: Any) -> Path:
    with TorchaxCheckpointer(directory, **settings) as ckpt:
        model = Described(hidden_size=2).to("jax")
        ckpt.attach(model, tokenizer=Tokenizer({"tokenizer.json": '{"ä": 1}'}))
        ckpt.save(step, force=True)
    return directory / str(step)


def test_a_step_holds_what_its_model_is(directory: Path) -> None:
    step = save(directory, options=CheckpointOptions(read_back=True))
    found = assets_of(directory)
    assert json.loads(found["model/config.json"]) == {
        "architectures": ["Described"],
        "hidden_size": 2,
        "model_type": "linear",
    }
    assert json.loads(found["model/generation_config.json"]) == {"max_length": 7}
    assert found["tokenizer/tokenizer.json"] == '{"ä": 1}'
    assert len(found) == 3
    # Orbax alone reads them too, as a JSON item.
    items = ocp.load_checkpointables(step, {"assets": None, "manifest": None})
    assert items["assets"]["files"] == found
    assert items["manifest"]["assets"] == items["assets"]["xxh3_64"]


def test_a_step_of_another_model_has_no_such_item(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": 1}, force=True)
    assert assets_of(directory) == {}
    assert not (directory / "1/assets").exists()


def test_a_changed_byte_is_found(directory: Path, tmp_path: Path) -> None:
    step = save(directory)
    flip_bit(step / "assets/data.json", 40)
    run("verify", directory, code=exit_codes.FOUND)
    with pytest.raises(CorruptCheckpointError, match="cannot read its assets"):
        assets_of(directory)
    run("copy", directory, tmp_path / "copy", code=exit_codes.FOUND)
    assert not (tmp_path / "copy/1").exists()
    # The state is sound, so a run goes on from it; but the step does not count as verified.
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        ckpt.attach(Described().to("jax"))
        report = ckpt.restore(1)
    assert (report.step, report.is_verified, report.missing) == (1, False, ())


@pytest.mark.parametrize("change", ["lost", "of another step", "no digest"])
def test_assets_that_the_manifest_does_not_name_are_refused(directory: Path, change: str) -> None:
    step = save(directory)
    path, said = step / "assets/data.json", "assets"
    if change == "lost":
        path.unlink()
    elif change == "of another step":
        edit_json(path, lambda content: content["files"].update({"model/config.json": "{}"}))
    else:
        edit_json(step / "manifest/data.json", lambda content: content.update(assets=[]))
        said = "expected the digest of the assets"
    with pytest.raises(CorruptCheckpointError, match=said):
        assets_of(directory)


def test_a_name_out_of_the_folder_is_refused_even_under_good_digests(directory: Path) -> None:
    step = save(directory)
    edit_json(step / "assets/data.json", lambda c: c["files"].update({"../x.json": "{}"}))
    seal = json.loads((step / "assets/data.json").read_text())["xxh3_64"]
    edit_json(step / "manifest/data.json", lambda content: content.update(assets=seal))
    with pytest.raises(CorruptCheckpointError, match="is not a relative path"):
        assets_of(directory)
    run("export", directory, directory.parent / "out", "--format", "hf", code=exit_codes.FOUND)
    assert not (directory.parent / "x.json").exists()


def test_copies_hold_them(directory: Path, tmp_path: Path) -> None:
    save(directory)
    run("copy", directory, tmp_path / "copy")
    assert assets_of(tmp_path / "copy") == assets_of(directory)
    assert run_json("diff", directory, tmp_path / "copy")["identical"]


def test_differences_are_listed(directory: Path, tmp_path: Path) -> None:
    a = save(directory)
    with TorchaxCheckpointer(tmp_path / "b", options=CheckpointOptions()) as ckpt:
        ckpt.attach(Described(hidden_size=3).to("jax"))
        ckpt.save(1, force=True)
    found = run_json("diff", a, tmp_path / "b/1", "--filter", "assets/*", code=exit_codes.FOUND)
    assert {d["name"]: d["what"] for d in found["values"]} == {
        "assets/model/config.json": "content",
        "assets/tokenizer/tokenizer.json": "only_in_a",
    }


def test_a_step_with_lost_assets_fails(directory: Path) -> None:
    def damaging() -> None:
        (draft,) = directory.glob("writing-*")
        flip_bit(draft / "assets/data.json", 40)

    at("commit the folder", damaging)
    with pytest.raises(SaveError, match="assets"):
        save(directory, options=CheckpointOptions(read_back=True))
    assert not (directory / "1").exists()


@pytest.mark.slow
def test_process_0_says_what_the_model_is(together: Together, tmp_path: Path) -> None:
    """In the durable directory; in a local tier each host says it in its own."""
    program = PROGRAMS / "arrays_on_processes.py"
    told = together(program, 2, "assets", tmp_path / "run", tmp_path / "local")
    for index, (found,) in enumerate(told):
        durable, local = found["durable"], found["local"]
        assert json.loads(durable["model/config.json"])["hidden_size"] == 0
        assert json.loads(local["model/config.json"])["hidden_size"] == index
        assert ("tokenizer/tokenizer.json" in local) == (index == 0)
        assert "tokenizer/tokenizer.json" in durable
