"""``torchax_ckpt.torch.StorageReader``: what torchax saved, loaded by ranks of plain PyTorch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from orbax.checkpoint import v1 as ocp
from support.damage import flip_arrays
from support.models import Box
from support.native import run_native, run_ranks, save_net

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.plain_torch import native_torch
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

GOLDEN = Path(__file__).parents[1] / "golden"
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
NARROW = ["e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz"]
DTYPES = [getattr(torch, n) for n in (*INTEGERS, *FLOATS, *(f"float8_{n}" for n in NARROW))]


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("adamw-fsdp", 2),
        *(
            pytest.param(f"{kind}-{parallel}", n, marks=pytest.mark.slow)
            for kind in ("adamw", "sgd", "muon")
            for parallel, n in (("fsdp", 1), ("fsdp", 4), ("tp", 2), ("tp", 4), ("2d", 4))
        ),
        pytest.param("adamw-fsdp-flat", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_load_what_they_need_to_the_bit(case: str, num_ranks: int, tmp_path: Path) -> None:
    save_net(tmp_path, case.partition("-")[0])
    assert run_ranks(case, num_ranks, tmp_path) == [""] * num_ranks


@pytest.mark.parametrize(
    "options",
    [
        CheckpointOptions(layout="flat", compression="zstd"),
        CheckpointOptions(reuse=["model"]),
    ],
    ids=["flat-compressed", "reuse"],
)
@pytest.mark.slow
def test_every_layout_loads(options: CheckpointOptions, tmp_path: Path) -> None:
    save_net(tmp_path, "muon", options=options)  # which leaves most weights as they are
    assert run_ranks("muon-fsdp", 2, tmp_path) == ["", ""]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_all_dtypes_of_torch_load(num_ranks: int, tmp_path: Path) -> None:
    with native_torch():
        octets = torch.arange(8 * 6 * 16, dtype=torch.int64).to(torch.uint8)
        tensors = {
            str(dtype): octets[: 48 * dtype.itemsize].view(dtype).reshape(8, 6).clone()
            for dtype in DTYPES
        }
        tensors["torch.bool"] = tensors["torch.uint8"] > 20
        torch.save(tensors, tmp_path / "expected.pt")
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        ckpt.attach(stateful={"box": Box(tensors)})
        ckpt.save(1, force=True)
    assert run_ranks("dtypes", num_ranks, tmp_path) == [""] * num_ranks


def test_a_step_that_is_damaged_for_one_rank_is_loaded_by_none(tmp_path: Path) -> None:
    save_net(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "run-1")
    flip_arrays(tmp_path / "run-1" / "2")
    save_net(tmp_path / "older", steps=1)
    newest = (tmp_path / "expected.pt").read_bytes()
    shutil.copy(tmp_path / "older" / "expected.pt", tmp_path)
    assert run_ranks("weights", 2, tmp_path) == ["", ""]
    # Of step 1, nobody's copy is intact on both.
    shutil.copytree(tmp_path / "run", tmp_path / "run-0")
    flip_arrays(tmp_path / "run-0" / "1")
    (tmp_path / "expected.pt").write_bytes(newest)
    for found in run_ranks("weights", 2, tmp_path):
        assert "CorruptCheckpointError" in found


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the load", "in read_data"])
def test_a_rank_that_dies_leaves_no_rank_waiting(moment: str, tmp_path: Path) -> None:
    save_net(tmp_path)
    found, died = run_ranks("weights", 2, tmp_path, DIES=moment)
    assert died == "died"
    assert found


def test_a_rank_holds_at_most_twice_what_it_needs(directory: Path) -> None:
    whole, rows = np.zeros((512, 512), np.float32), [np.zeros((64, 64), np.float32)] * 8
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"whole": whole, "rows": rows}, force=True)
    stored = StoredStep(RunDirectory(directory, read_only=True).candidates(1)[-1])
    assert stored.leaves["state/rows/7"].stack
    row, part = ((0, 64), (0, 64)), ((0, 1), (0, 64))
    for wanted, sizes in (
        ({"state/whole": [((0, 512), (64, 128))]}, [131_072]),
        ({"state/whole": [((0, 512), (9, 41)), ((500, 512), (0, 64))]}, [65_536, 3072]),
        ({"state/whole": [((0, 512), (128, 384))]}, [whole.nbytes + 64]),  # aligned, and no copy
        ({"state/rows/1": [row], "state/rows/2": [part]}, [16_384, 256]),
    ):
        held = [part for parts in stored.read_parts(wanted).values() for _, part in parts]
        assert [(part if part.base is None else part.base).nbytes for part in held] == sizes


def test_what_differs_is_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    save_net(tmp_path)
    found = run_native(
        """
weights = {n: torch.zeros_like(t) for n, t in expected["model"].items()}
weights["more"], weights["norm.bias"] = torch.zeros(2), torch.zeros(3)
weights["small.weight"] = weights["small.weight"].float()
before = {n: t.clone() for n, t in weights.items()}
reader = StorageReader(run)
for planner in (LoadPlanner(), dcp.DefaultLoadPlanner()):
    load = lambda: dcp.load({"model": weights}, storage_reader=reader, planner=planner)
    print(json.dumps(failure(load)))
    require_equal(weights, before)
del weights["more"], weights["norm.bias"]
print(json.dumps(failure(load)))  # DCP's planner does not compare dtypes
require_equal(weights, {n: before[n] for n in weights})
del weights["small.weight"]
dcp.load(weights, storage_reader=StorageReader(run, 1, {"model": ""}))
wrong = StorageReader(run, prefix={"modle": ""})
print(json.dumps(failure(lambda: dcp.load(weights, storage_reader=wrong))))
reader = StorageReader(run, 7)
load = lambda: dcp.load({"model": weights}, storage_reader=reader, planner=LoadPlanner())
print(json.dumps(failure(load)))
(run / "2").rename(run / "7")
load()  # the same reader finds the step now
require_equal(weights, {n: expected["model"][n] for n in weights})
state = {"app": {"lr_scheduler": {"step_size": 0}}}
dcp.load(state, storage_reader=StorageReader(run, prefix="app"), planner=LoadPlanner())
assert state == {"app": {"lr_scheduler": {"step_size": 7}}}, state
groups = {"param_groups.0.lr": 0}  # flattened, of the parameter "0"
load = lambda: dcp.load({"optimizer": groups}, storage_reader=reader, planner=LoadPlanner())
print(json.dumps(failure(load)))
groups = {"param_groups": [{"lr": 0}]}
load()
assert groups["param_groups"][0]["lr"] == 0.25
dcp.save(state, checkpoint_id=folder / "dcp")
for more in ({}, {"x": 1}):
    load = lambda: dcp.load(state | more, checkpoint_id=folder / "dcp", planner=LoadPlanner())
    print(json.dumps(failure(load)))
""",
        tmp_path,
    )
    (kind, text), *others = map(json.loads, found.splitlines())
    assert kind == "MismatchError"
    for part in ("model.more", "model.norm.bias: expected torch.float32[3]", "model.small.weight"):
        assert part in text
    assert "Size mismatch" in others[0][1]
    kinds = ["MismatchError", "SelectionError", "StepNotFoundError", *["CallError"] * 3]
    assert [kind for kind, _ in others[1:]] == kinds


@pytest.mark.slow
def test_optimizers_that_name_their_parameters_load(tmp_path: Path) -> None:
    save_net(tmp_path, "sgd")
    run_native(
        """
from torch.distributed.checkpoint import state_dict as sd
for flat in (False, True):
    for planner in (LoadPlanner(), dcp.DefaultLoadPlanner()):
        model, options = Net(), sd.StateDictOptions(flatten_optimizer_state_dict=flat)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=9, momentum=0.25)
        state = sd.get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"optimizer": state}, storage_reader=StorageReader(run), planner=planner)
        sd.set_optimizer_state_dict(model, optimizer, state, options=options)
        [group] = optimizer.param_groups
        assert group["param_names"] == [name for name, _ in model.named_parameters()]
        assert (group["lr"], group["momentum"]) == (0.125, 0.5)
""",
        tmp_path,
    )


@pytest.mark.slow
def test_a_parameter_without_a_gradient_has_no_state_afterwards_either(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("used", "unused")})
    model = model.to("jax")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model["used"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 30])
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        ckpt.attach(model, optimizer, lr_scheduler=scheduler)
        ckpt.save(1, force=True)
    run_native(
        """
from collections import Counter
from torch.distributed.checkpoint import state_dict as sd
def build():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2) for n in ("used", "unused")})
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 30])
def load(*left_out, frozen=(), **settings):
    model, optimizer, scheduler = build()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    weights, moments = sd.get_state_dict(model, optimizer)
    for name in left_out:
        del moments["state"][name]
    state = {"model": weights, "optimizer": moments, "lr_scheduler": scheduler.state_dict()}
    dcp.load(state, storage_reader=StorageReader(run), planner=LoadPlanner(**settings))
    assert state["lr_scheduler"]["milestones"] == Counter({2: 2, 30: 1})
    options = sd.StateDictOptions(strict=not left_out)
    sd.set_optimizer_state_dict(model, optimizer, moments, options=options)
    return model, optimizer, scheduler
restore(run, *(wanted := build()))
kind, text = failure(load)
assert kind == "MismatchError" and "optimizer.state.unused.weight.exp_avg" in text, text
unused = "unused.weight", "unused.bias"
model, optimizer, _ = partial = load(allow_partial_load=True)
made = [optimizer.state.pop(parameter) for parameter in model["unused"].parameters()]
assert [float(state["step"]) for state in made] == [1, 1] and not made[0]["exp_avg"].any()
for found in (load(*unused), load(frozen=unused), partial):
    require_equal(state_of(*wanted), state_of(*found))
model, optimizer, _ = load(*unused, frozen=["used.bias"])  # whose state the program lacks
assert model["used"].weight in optimizer.state and model["used"].bias not in optimizer.state
""",
        tmp_path,
    )


def test_steps_of_bare_orbax_load_without_digests(tmp_path: Path) -> None:
    tree = {"params": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)}}
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, {**tree, "n": [jnp.arange(3)]})
    found = run_native(
        """
import logging
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
state = {"params": {"w": torch.zeros(3, 4), "b": torch.zeros(3).bfloat16()}}
state["n"] = {"0": torch.zeros(3, dtype=torch.int32)}
dcp.load(state, storage_reader=StorageReader(run), planner=LoadPlanner())
assert state["params"]["w"].flatten().tolist() == list(range(12))
assert state["params"]["b"].tolist() == [1, 1, 1] and state["n"]["0"].tolist() == [0, 1, 2]
""",
        tmp_path,
    )
    assert "was written by Orbax alone and has no digests" in found


def test_each_rank_loads_the_state_of_its_process() -> None:
    run_native(
        """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
run, drawn, said = folder / "v1" / "processes", [], []
for rank, ranks in ((0, 2), (1, 2), (0, 1)):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    state = {"dataloader": {"position": 0, "generator": torch.zeros(5056, dtype=torch.uint8)}}
    reader = StorageReader(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in ({"model": {"0.bias": torch.zeros(8)}}, state, state):
            dcp.load(part, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
            said.append([str(w.message) for w in caught if "was saved by" in str(w.message)])
    drawn.append(bits(state["dataloader"]["generator"]))
    dist.destroy_process_group()
assert drawn[0] != drawn[1] and drawn[2] == drawn[0]
*others, [once], [again] = said
assert not any(others) and once == again, said
assert "(dataloader)" in once and "restore with 2 (plain PyTorch: with StorageR" in once
with warnings.catch_warnings():
    warnings.simplefilter("error")
    restore(run, torch.nn.Linear(1, 1), strict=False)
""",
        GOLDEN,
    )


def test_values_that_are_no_tensors_load_from_the_newest_intact_step(tmp_path: Path) -> None:
    with native_torch():
        one = torch.ones(2)
        values = {"tuple": (one, 1.5), "wide": one.to(torch.complex64)}  # narrowed by torchax
    values |= {"set": {1, "x"}, "array": np.arange(3), "one": np.int8(4)}
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        ckpt.attach(stateful={"box": Box(values)})
        for step in (1, 2):
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    flip_arrays(tmp_path / "run" / "2")
    run_native(
        """
for planner in (LoadPlanner(), dcp.DefaultLoadPlanner()):
    box = dict.fromkeys(("set", "tuple", "array", "one"))
    box["wide"] = torch.zeros(2, dtype=torch.complex128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = {"stateful": {"box": box}}
        dcp.load(state, storage_reader=StorageReader(run), planner=planner)
    assert any("skipping an unreadable checkpoint: step 2" in str(w.message) for w in caught)
    tensor, number = box["tuple"]
    assert tensor.tolist() == box["wide"].tolist() == [1, 1] and box["set"] == {1, "x"}
    assert number == 1.5 and box["array"].tolist() == [0, 1, 2] and box["one"] == 4
    assert box["one"].dtype == "int8"
""",
        tmp_path,
    )


def test_a_step_that_is_deleted_meanwhile_is_not_found(tmp_path: Path) -> None:
    save_net(tmp_path)
    found = run_native(
        """
import shutil
class Slow(LoadPlanner):
    def create_local_plan(self):
        shutil.rmtree(run / "2")
        return super().create_local_plan()

deleting = torch.nn.Linear(1, 1)
deleting.register_state_dict_pre_hook(lambda *args: shutil.rmtree(run / "1"))
print(json.dumps(failure(lambda: restore(run, deleting, step=1, strict=False))))
weights = {n: torch.zeros_like(t) for n, t in expected["model"].items()}
load = lambda: dcp.load({"model": weights}, storage_reader=StorageReader(run, 2), planner=Slow())
print(json.dumps(failure(load)))
""",
        tmp_path,
    )
    assert [kind for kind, _ in map(json.loads, found.splitlines())] == ["StepNotFoundError"] * 2
