"""``torchax_ckpt.torch.restore``: a run of torchax goes on in one process of plain PyTorch."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.commands import run
from support.compare import assert_trees_identical
from support.damage import edit_json, flip_arrays
from support.native import plain, run_native, save_net
from support.native_net import Loader, Net, optimizer_of, state_of
from support.processes import run_python
from support.training import before_enabling, resume, save

from torchax_ckpt import TorchaxCheckpointer, torchax_backend
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import CorruptCheckpointError, MismatchError
from torchax_ckpt.torch import restore

RUN_OF_TWO = ROOT / "tests" / "golden" / "v1" / "processes"

RESTORE = """
kind = sys.argv[2]
model, optimizer, scheduler = built(kind)
report = restore(run, model, optimizer, scheduler)
require_equal(state_of(model, optimizer, scheduler), expected)
for name, tensor in model.state_dict(keep_vars=True).items():
    assert tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter)
model(torch.arange(8)).sum().backward()
optimizer.step()
assert model.head.weight is model.embed.weight
print(report)
"""


@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(k, marks=pytest.mark.slow) for k in ("sgd", "muon"))]
)
def test_all_objects_have_what_was_saved_to_the_bit(kind: str, tmp_path: Path) -> None:
    save_net(tmp_path, kind)
    found = run_native(RESTORE, tmp_path, kind)
    assert "step=2" in found
    assert "left_out=('rng/torchax',)" in found
    assert "is_verified=True" in found


GROUPS = """
models = {name: torch.nn.Linear(2, 1).to(device) for name in "abc"}
pair = torch.nn.ModuleDict({name: models[name] for name in "bc"})
optimizers = {
    "a": torch.optim.AdamW(models["a"].parameters()),
    "pair": torch.optim.SGD(pair.parameters(), momentum=0.5),
}
"""


@pytest.mark.slow
def test_generators_loaders_and_groups_of_objects_go_on(tmp_path: Path) -> None:
    built: dict[str, Any] = {"torch": torch, "device": "jax"}
    exec(GROUPS, built)
    models = built["models"]
    for number, parameter in enumerate(p for m in models.values() for p in m.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    for optimizer in built["optimizers"].values():
        optimizer.step()
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        loader = Loader()
        loader.count = 5
        scheduler = torch.optim.lr_scheduler.StepLR(built["optimizers"]["a"], 7)
        ckpt.attach(models, built["optimizers"], lr_scheduler=scheduler, dataloader=loader)
        ckpt.save(1, force=True)
    wanted = [float(np.random.rand()), random.random()]
    with torchax_backend.native_torch():
        wanted.append(float(torch.rand(())))
    found = run_native(
        """
import numpy
from torch.distributed.checkpoint import state_dict as sd
from support.native_net import Loader
device, GROUPS = "cpu", sys.argv[2]
exec(GROUPS)
class Energon(Loader):
    save_state_rank, restore_state_rank = Loader.state_dict, Loader.load_state_dict
    state_dict = load_state_dict = None
loader, scheduler = Energon(), torch.optim.lr_scheduler.StepLR(optimizers["a"], 3)
class Refuses(Loader):
    def load_state_dict(self, state): raise KeyError("no")
failed = failure(lambda: restore(run, models, lr_scheduler=scheduler, dataloader=Refuses()))
assert failed[0] == "MismatchError" and scheduler.step_size == 3, (failed, scheduler.step_size)
restore(run, models, optimizers, scheduler, loader)
assert scheduler.step_size == 7
drawn = [float(numpy.random.rand()), random.random(), float(torch.rand(()))]
print(json.dumps([drawn, loader.count, [m.weight.tolist() for m in models.values()]]))
expected = {k: optimizer.state_dict() for k, optimizer in optimizers.items()}
for number in range(4):
    exec(GROUPS)
    options = sd.StateDictOptions(flatten_optimizer_state_dict=number < 2)
    parts = {"a": (models["a"], optimizers["a"]), "pair": (pair, optimizers["pair"])}
    if number % 2:
        parts = {"": (torch.nn.ModuleDict(models), [*optimizers.values()])}  # merged
    found = {k: sd.get_optimizer_state_dict(*part, options=options) for k, part in parts.items()}
    state = {"optimizer": found.get("", found)}
    dcp.load(state, storage_reader=StorageReader(run), planner=LoadPlanner())
    for key, part in parts.items():
        sd.set_optimizer_state_dict(*part, found[key], options=options)
    for key, optimizer in optimizers.items():
        require_equal(optimizer.state_dict(), expected[key])
        require_equal(expected[key]["state"], optimizer.state_dict()["state"])
        assert optimizer.state
""",
        tmp_path,
        GROUPS,
    )
    drawn, count, weights = json.loads(found)
    assert drawn == wanted
    assert count == 5
    assert weights == [m.weight.tolist() for m in models.values()]


EXTRA = """
class Scaled(torch.nn.Linear):
    scale = None
    get_extra_state = lambda self: self.scale
    def set_extra_state(self, state): self.scale = state
"""


@pytest.mark.slow
def test_extra_state_comes_back_also_into_compiled_modules(tmp_path: Path) -> None:
    built: dict[str, Any] = {"torch": torch}
    exec(EXTRA, built)
    layer = built["Scaled"](2, 2)
    layer.scale = {"by": 7}
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        ckpt.attach(torch.nn.Sequential(layer).to("jax"))
        ckpt.save(1, force=True)
    source = """
for wrap in (torch.nn.Module.requires_grad_, torch.compile):
    inner = Scaled(2, 2)
    restore(run, wrap(torch.nn.Sequential(wrap(inner))))
    assert inner.scale == {"by": 7}, wrap
del Scaled.set_extra_state
print(failure(lambda: restore(run, torch.nn.Sequential(Scaled(2, 2)))))
"""
    found = run_native(EXTRA + source, tmp_path)
    assert "model/0/_extra_state: expected a module with set_extra_state, found a" in found


@pytest.mark.slow
def test_what_cannot_be_filled_in_place_is_refused_before_anything_changes() -> None:
    run_native(
        """
for problem, bias in {
    "expanded": torch.nn.Parameter(torch.zeros(1).expand(8)),
    "sparse": torch.nn.Parameter(torch.zeros(8).to_sparse()),
    "uninitialized": torch.nn.UninitializedParameter(),
}.items():
    layer = torch.nn.Linear(8, 8)
    before, layer.bias = bits(layer.weight), bias
    kind, text = failure(lambda: restore(folder, torch.nn.Sequential(layer), strict=False))
    assert kind == "AttachError" and "model/0.bias: is" in text and problem in text, text
    assert bits(layer.weight) == before
""",
        RUN_OF_TWO,
    )


@pytest.mark.slow
def test_a_restore_in_inference_mode_gives_what_can_be_trained() -> None:
    run_native(
        """
def restored():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    restore(folder, model, optimizer, strict=False)
    return model, optimizer
model, optimizer = restored()
with torch.inference_mode():
    inside = restored()
    restore(folder, model, optimizer, strict=False)
restore(folder, *inside, strict=False)  # tensors of inference mode, outside of it
require_equal(dict(inside[0].state_dict()), dict(model.state_dict()))
model(torch.ones(8)).sum().backward()
optimizer.step()
""",
        RUN_OF_TWO,
    )


def test_nested_optimizer_state_becomes_as_its_parameters_are(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).to("jax")
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"old": [{"moment": torch.ones_like(model.weight)}]}
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(1, force=True)
    source = """
model = torch.nn.Linear(2, 1).double()
optimizer = torch.optim.SGD(model.parameters())
restore(run, model, optimizer)
print(optimizer.state[model.weight]["old"][0]["moment"])
"""
    assert run_native(source, tmp_path) == "tensor([[1., 1.]], dtype=torch.float64)\n"


def test_an_optimizer_has_the_stored_state_afterwards_and_no_other(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).to("jax")
    optimizer: Any = torch.optim.SGD(model.parameters(), momentum=0.5)
    optimizer.state["extra"] = {"seen": [1, torch.ones(2, device="jax")]}
    empty: Any = torch.optim.SGD([{"params": []}])
    empty.state["extra"] = torch.arange(2, device="jax")
    save(tmp_path, model, {"full": optimizer, "empty": empty})
    with before_enabling():
        native = torch.nn.Linear(2, 1)
        others: dict[str, Any] = {
            "full": torch.optim.SGD(native.parameters(), momentum=0.5),
            "empty": torch.optim.SGD([{"params": []}]),
        }
        for key in ("old", native.weight):
            others["full"].state[key] = {"momentum_buffer": torch.ones(1, 2)}
        others["empty"].state["old"] = 1
        assert not restore(tmp_path, native, others).mismatched
        assert {key for key, value in others["full"].state.items() if value} == {"extra"}
        assert others["full"].state["extra"]["seen"][1].tolist() == [1, 1]
        assert others["empty"].state.keys() == {"extra"}
        assert others["empty"].state["extra"].tolist() == [0, 1]
    fresh = torch.nn.Linear(2, 1).to("jax")
    full, empty = (
        torch.optim.SGD(fresh.parameters(), momentum=0.5),
        torch.optim.SGD([{"params": []}]),
    )
    resume(tmp_path, fresh, {"full": full, "empty": empty})
    assert empty.state["extra"].tolist() == [0, 1]


def test_groups_that_share_a_stored_rate_get_one_each(tmp_path: Path) -> None:
    """Schedulers change a tensor rate in place."""
    model = torch.nn.Linear(2, 1).to("jax")
    with torchax_backend.native_torch():
        rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["lr"] = rate
    save(tmp_path, model, optimizer)
    with before_enabling():
        native = torch.nn.Linear(2, 1)
        groups = [{"params": [p], "lr": torch.tensor(0.1)} for p in native.parameters()]
        split = torch.optim.SGD(groups, foreach=False)
        restore(tmp_path, native, split, strict=False)
        first, second = (group["lr"] for group in split.param_groups)
        first.mul_(2)
        assert (first.item(), second.item()) == (1, 0.5)


def test_a_number_in_place_of_an_optimizers_tensor_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).to("jax")
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[model.weight]["step"] = 1.0
    save(tmp_path, model, optimizer)
    with before_enabling():
        native = torch.nn.Linear(2, 1)
        live = torch.optim.Adam(native.parameters())
        native(torch.ones(2)).sum().backward()
        live.step()
        before = copy.deepcopy(live.state_dict())
        where = re.escape("optimizer/weight/step: expected torch.float32[], found a value that")
        with pytest.raises(MismatchError, match=where):
            restore(tmp_path, native, live)
        assert_trees_identical(live.state_dict(), before)


def test_a_restore_that_does_not_fit_asks_no_object_for_its_state(tmp_path: Path) -> None:
    class Drawing(Loader):
        def state_dict(self) -> dict[str, int]:
            torch.rand(1)
            return super().state_dict()

    save(tmp_path, torch.nn.Linear(2, 1).to("jax"), dataloader=Loader())
    with before_enabling():
        other, before = torch.nn.Linear(3, 1), torch.get_rng_state()
        with pytest.raises(MismatchError):
            restore(tmp_path, other, dataloader=Drawing())
        assert torch.get_rng_state().equal(before)


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).to("jax")
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    save(tmp_path, model, optimizer, lr_scheduler=scheduler)
    with before_enabling():
        native = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(native.parameters())
        other = torch.optim.lr_scheduler.ConstantLR(optimizer)
        before = other.state_dict()
        with pytest.raises(MismatchError, match="lr_scheduler: expected ConstantLR, found StepLR"):
            restore(tmp_path, native, optimizer, other)
        restore(tmp_path, native, optimizer, other, strict=False)
        assert other.state_dict() == before


def test_a_value_that_no_save_writes_changes_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).to("jax")
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    save(tmp_path, model, optimizer, lr_scheduler=scheduler)
    (manifest,) = tmp_path.glob("*/manifest")

    def damage(raw: Any) -> None:
        ((_, _), (_, groups)) = raw["document"]["optimizer"]["dict"]
        groups[0]["dict"][-1][1] = {"int": "zz"}

    edit_json(manifest / "data.json", damage)
    with before_enabling():
        native = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(native.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
        before = copy.deepcopy(state_of(native, optimizer, scheduler))
        with pytest.raises(CorruptCheckpointError, match="malformed 'int' node"):
            restore(tmp_path, native, optimizer, scheduler)
        assert_trees_identical(state_of(native, optimizer, scheduler), before)


def test_a_functional_state_in_place_of_the_model_is_named(tmp_path: Path) -> None:
    with TorchaxCheckpointer(tmp_path) as ckpt:
        ckpt.save(1, state={"w": 1}, force=True)
    with before_enabling(), pytest.raises(MismatchError, match=r"given \(w\), in place of modules"):
        restore(tmp_path, torch.nn.Linear(2, 1))


@pytest.mark.slow
def test_what_differs_is_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    save_net(tmp_path)
    found = run_native(
        """
model, optimizer, scheduler = built("sgd")
model.small = torch.nn.Linear(16, 12)
before = {n: t.clone() for n, t in model.state_dict().items()}
print(json.dumps(failure(lambda: restore(run, model, optimizer, scheduler))))
require_equal(dict(model.state_dict()), before)
optimizer = optimizer_of(model, "adamw")
report = restore(run, model, optimizer, strict=False)
assert "model/small.bias" in report.missing, report
assert "model/small.weight" in report.mismatched, report
assert model.small.weight not in optimizer.state and model.norm.bias in optimizer.state
print(json.dumps(failure(lambda: restore(run, torch.nn.Linear(2, 2, device="meta")))))
print(json.dumps(failure(lambda: restore(run, model, step=9))))
untied = Net()
untied.head.weight = torch.nn.Parameter(untied.head.weight.clone())
print(json.dumps(failure(lambda: restore(run, untied))))

class Refuses:
    def state_dict(self): return {"n": 1}
    def load_state_dict(self, state):
        self.broken = True
        raise KeyError("no")  # also when it gets its old state back

model, optimizer, scheduler = built()
Refuses.__qualname__ = type(scheduler).__qualname__
before, refusing = model.state_dict()["embed.weight"].clone(), Refuses()
print(json.dumps(failure(lambda: restore(run, model, optimizer, refusing))))
assert bits(model.embed.weight) == bits(before) and not optimizer.state
assert refusing.broken
""",
        tmp_path,
    )
    (_, text), *others = errors = list(map(json.loads, found.splitlines()))
    for part in ("model/small.bias", "model/small.weight", "expected SGD, found AdamW", "Give"):
        assert part in text
    kinds = ["MismatchError", "AttachError", "StepNotFoundError", "MismatchError", "MismatchError"]
    tied = "expected embed.weight on its own, found embed.weight tied to head.weight"
    assert f"model/embed.weight: {tied}" in others[2][1]
    assert [kind for kind, _ in errors] == kinds
    assert "lr_scheduler: refused the stored state: KeyError" in others[-1][1]


@pytest.mark.slow
def test_a_damaged_step_is_skipped_and_named(tmp_path: Path) -> None:
    save_net(tmp_path)
    flip_arrays(tmp_path / "run" / "2")
    found = run_native("print(restore(run, built()[0]))", tmp_path)
    assert "step=1" in found
    assert "skipped_steps=(2,)" in found
    shutil.rmtree(tmp_path / "run" / "1")
    assert "Corrupt" in run_native("print(failure(lambda: restore(run, built()[0])))", tmp_path)


@pytest.mark.slow
def test_no_flipped_bit_is_restored(tmp_path: Path) -> None:
    save_net(tmp_path, steps=1)
    run_native(
        """
files = sorted(path for path in (run / "1").rglob("*") if path.is_file())
sizes = [path.stat().st_size for path in files]
chance, detected = random.Random(5), 0
for flip in range(200):
    [path] = chance.choices(files, sizes)
    before = path.read_bytes()
    after = bytearray(before)
    after[chance.randrange(len(after))] ^= 1 << chance.randrange(8)
    path.write_bytes(after)
    model, optimizer, scheduler = built()
    try:
        if flip % 2:
            restore(run, model, optimizer, scheduler)
            found = state_of(model, optimizer, scheduler)
        else:
            found = {"model": {n: torch.zeros_like(t) for n, t in expected["model"].items()}}
            dcp.load(found, storage_reader=StorageReader(run), planner=LoadPlanner())
        require_equal(found, expected)
    except (errors.CheckpointError, dcp.api.CheckpointException):
        detected += 1
    path.write_bytes(before)
assert detected > 60, detected
""",
        tmp_path,
    )


# What pip installs with etils[epath], what fsspec tries to import, and what Cython makes.
OF_THESE = {"backports", "cython_runtime", "importlib_resources", "typing_extensions", "zipp"}


def test_loading_needs_little_time_to_import_and_only_the_packages_that_the_page_names() -> None:
    script = """
import time
began = time.process_time()
import json, sys, torch, torch.distributed.checkpoint, warnings
before, middle = {*sys.modules}, time.process_time()
from torchax_ckpt.torch import LoadPlanner, StorageReader, restore
share = (time.process_time() - middle) / (middle - began)
warnings.simplefilter("ignore")
restore(sys.argv[1], torch.nn.Linear(1, 1), strict=False)
names = {name.partition(".")[0] for name in sys.modules.keys() - before}
print(json.dumps([share, sorted(names - sys.stdlib_module_names)]))
from torchax_ckpt.publishing import Reader
assert not {"jax", "torchax", "orbax"} & sys.modules.keys()
"""
    share, modules = json.loads(run_python(script, str(RUN_OF_TWO), fresh=True).stdout)
    assert share < 0.2  # of the time that torch and DCP take: other processes may slow down both
    page = (ROOT / "docs" / "native-pytorch.md").read_text()
    (line,) = re.findall(r'pip install "(etils.*)$', page, re.M)
    named = {word.partition("[")[0].replace("-", "_") for word in line.split()}
    assert {m for m in modules if m[0] != "_"} <= {*named, *OF_THESE, "torchax_ckpt"}


def test_what_plain_pytorch_trained_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    found = run_native(
        """
from torch.distributed.checkpoint.state_dict import get_state_dict
model, optimizer, _ = built()
model(torch.arange(8)).sum().backward()
optimizer.step()
weights, moments = get_state_dict(model, optimizer)
del weights["head.weight"]
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
torch.save({"model": weights, "optimizer": moments}, folder / "expected.pt")
""",
        tmp_path,
    )
    assert not found
    arguments = (tmp_path / "dcp", tmp_path / "run", "--optimizer", "AdamW")
    run("import", *arguments, "--tie", "head.weight=embed.weight")
    with before_enabling():
        model = Net()
    model = model.to("jax")
    model.head.weight = model.embed.weight
    optimizer = optimizer_of(model, "adamw")
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        assert ckpt.attach(model, optimizer) == 0
    with torchax_backend.native_torch():
        expected = torch.load(tmp_path / "expected.pt", weights_only=True)["optimizer"]
    found = plain(state_of(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7)))
    assert_trees_identical(found["optimizer"]["state"], expected["state"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_what_optimizers_have_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    script = """
from torch.distributed.checkpoint.state_dict import get_state_dict
def save(name, change, kinds=(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.25)),)):
    model = torch.nn.ModuleDict({"img/enc": torch.nn.Linear(4, 4)})
    optimizers = [kind([p]) for kind, p in zip(kinds, model.parameters())]
    if len(kinds) == 1:
        optimizers[0].add_param_group({"params": [model["img/enc"].bias], "lr": 0.5})
    weights, moments = get_state_dict(model, optimizers)
    change(moments["state"]["img/enc.weight"])
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / name)
save("taken", lambda state: state.update(step=7, kind="fast"))
save("nested", lambda state: state.update(past=[torch.ones(2)]))
save("code", lambda state: state.update(past=random.Random()))
save("several", lambda state: None, (torch.optim.RMSprop, torch.optim.AdamW))
"""
    assert not run_native("import random\n" + script, tmp_path)
    for name, message in {
        "nested": "found optimizer/state/img%2Fenc.weight/past/0.",
        "code": "optimizer/state/img%2Fenc.weight/past: expected plain tensors",
        "several": "found one with alpha and one with amsgrad",
    }.items():
        arguments = (tmp_path / name, tmp_path / "none", "--optimizer", "AdamW")
        assert message in run("import", *arguments, code=exit_codes.USAGE)
        assert not (tmp_path / "none").exists()
    run("import", tmp_path / "taken", tmp_path / "run", "--optimizer", "AdamW")
    with before_enabling():
        model = torch.nn.ModuleDict({"img/enc": torch.nn.Linear(4, 4)})
    weight, bias = model.to("jax").parameters()
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias]}], lr=0.125)
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        assert ckpt.attach(model, optimizer) == 0
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.5]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert (optimizer.state[weight]["step"], optimizer.state[weight]["kind"]) == (7, "fast")
