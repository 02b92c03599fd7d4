"""Warm starts: weights from another run, from Hugging Face's files, from torch's DCP."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from jax.sharding import Mesh, NamedSharding
from support.compare import assert_trees_identical, bits, training_state
from support.damage import damage
from support.models import values
from support.torch_files import save_dcp
from support.training import P, before_enabling, fsdp_mesh, fsdp_rule, mlp, save, save_state
from torch import nn

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend, warm_start
from torchax_ckpt.errors import (
    AttachError,
    CorruptCheckpointError,
    MismatchError,
    SelectionError,
    StepNotFoundError,
    UninitializedLeafError,
    UnsupportedLeafError,
    UnusableStateError,
)
from torchax_ckpt.formats import safetensors_io, tensor_files
from torchax_ckpt.restoring import file_weights
from torchax_ckpt.storage.arrays import assembly


class Gpt(nn.Module):
    """Names as in Hugging Face's GPT-2, a tie, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 16)
        self.h = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(16, 16)}) for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.full((), 0.5))


class Mine(nn.Module):
    """The same under other names, with an adapter that no file has."""

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": nn.Linear(16, 16)}) for _ in "123")
        self.lora_A = nn.Linear(16, 2, bias=False)
        self.head = nn.Linear(16, num_classes or 32, bias=False)
        if num_classes is None:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 0.25))


RENAME = {"wte": "embed", "h.*.attn": "layers.*.attention"}


def gpt() -> Any:
    with before_enabling():
        torch.manual_seed(5)
        return Gpt()


def on_jax(model: Any) -> Any:
    model.to("jax")
    if model.head.weight.shape == model.embed.weight.shape:
        model.head.weight = model.embed.weight  # moving a module unties it
    return model


def on_meta(build: Any) -> Any:
    with before_enabling(), torch.device("meta"):
        return build()


def state(model: nn.Module) -> dict[str, Any]:
    with before_enabling():
        return dict(model.state_dict())


def save_hub(tensors: dict[str, Any], folder: Path, *, num_files: int = 2) -> Path:
    """Several files and an index, as Hugging Face writes them."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    with before_enabling():
        for number in range(num_files):
            file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
            part = {n: t for i, (n, t) in enumerate(tensors.items()) if i % num_files == number}
            safetensors.torch.save_file(part, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def links_to(hub: Path, folder: Path) -> Path:
    """Links to the files, as in Hugging Face's cache."""
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshot").mkdir()
    for number, file in enumerate(sorted(hub.iterdir())):
        (folder / "blobs" / str(number)).write_bytes(file.read_bytes())
        (folder / "snapshot" / file.name).symlink_to(f"../blobs/{number}")
    return folder / "snapshot"


def file_of(folder: Path, **arrays: Any) -> Path:
    """A file of weights with these arrays, under these names."""
    safetensors.numpy.save_file(arrays, folder / "x.safetensors")
    return folder / "x.safetensors"


def save_run(model: Any, folder: Path) -> Path:
    save(folder, model, step=7)
    return folder


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Any]]:
    """The same weights in every form, and what they are."""
    root = tmp_path_factory.mktemp("origins")
    model = gpt()
    tensors = state(model)
    hub = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
    with before_enabling():
        safetensors.torch.save_model(model, str(root / "one.safetensors"))
    live = gpt().to("jax")
    live.head.weight = live.wte.weight
    return {
        "file": root / "one.safetensors",
        "hub": save_hub(hub, root / "hub"),
        "links": links_to(root / "hub", root / "links"),
        "index": root / "hub/model.safetensors.index.json",
        "dcp": save_dcp({"model": hub, "optimizer": {"lr": 0.1}}, root / "dcp"),
        "flat_dcp": save_dcp(hub, root / "flat_dcp"),
        "run": save_run(live, root / "run"),
    }, values(tensors)


FORMS = ["file", "hub", "links", "index", "dcp", "flat_dcp", "run"]


def expect_mine(model: nn.Module, expected: dict[str, Any]) -> None:
    found = values(dict(model.state_dict()))
    assert found["embed.weight"] == found["head.weight"] == expected["wte.weight"]
    assert found["scale"] == expected["scale"]
    for i in range(3):
        for key in ("weight", "bias"):
            assert found[f"layers.{i}.attention.{key}"] == expected[f"h.{i}.attn.{key}"]


def random_state() -> list[Any]:
    numpy_state = np.random.get_state(legacy=False)["state"]
    with torchax_backend.native_torch():
        return [bits(torchax_backend.prng_key()), torch.get_rng_state().tolist(), str(numpy_state)]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_takes_its_first_weights(form: str, origins: Any) -> None:
    paths, expected = origins
    model = on_jax(Mine())
    objects = list(model.parameters())
    adapter, random = bits(model.lora_A.weight), random_state()
    report = warm_start(model, paths[form], exclude="lora_A", rename=RENAME)
    expect_mine(model, expected)
    assert bits(model.lora_A.weight) == adapter
    assert random_state() == random
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight
    assert report.step == (7 if form == "run" else None)
    assert report.left_out == ("model/lora_A.weight",)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), {})


@pytest.mark.parametrize("form", FORMS)
def test_a_model_on_the_meta_device_is_filled_on_a_mesh(form: str, origins: Any) -> None:
    paths, expected = origins
    model = on_meta(Mine)
    optimizer = torch.optim.AdamW(model.parameters())
    rule = fsdp_rule(fsdp_mesh())

    def init(name: str, abstract: Any) -> Any:
        assert name == "lora_A.weight"
        return np.ones(abstract.shape, abstract.dtype)

    warm_start(model, paths[form], exclude="lora_A", rename=RENAME, shardings=rule, init=init)
    expect_mine(model, expected)
    for name, tensor in model.state_dict(keep_vars=True).items():
        array = torchax_backend.buffer(tensor)
        assert array.sharding.is_equivalent_to(rule(name, array), array.ndim), name
    assert (np.asarray(torchax_backend.buffer(model.lora_A.weight)) == 1).all()
    assert model.head.weight is model.embed.weight
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters()
    }


# --- a run of its own ---------------------------------------------------------------------------


def test_the_directory_of_a_running_training_can_be_read(directory: Path) -> None:
    model = mlp()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        fresh = mlp()
        assert warm_start(fresh, directory).is_verified is False  # its random state is not read
        assert_trees_identical(training_state(fresh), training_state(model))
        ckpt.save(2, force=True)


def test_a_named_step_of_several_models_or_of_functions(directory: Path, tmp_path: Path) -> None:
    models = {"g": mlp(), "d": mlp()}
    save(directory, models)
    params = {n: torchax_backend.buffer(p) for n, p in models["g"].named_parameters()}
    save_state(tmp_path / "functional", {"params": params}, step=4)
    for source, at, step in (
        (directory, "model/g", 1),
        (tmp_path / "functional", "state/params", 4),
    ):
        fresh = mlp()
        assert warm_start(fresh, source, step=step, at=at).step == step
        assert_trees_identical(training_state(fresh), training_state(models["g"]))
        with pytest.raises(StepNotFoundError):
            warm_start(fresh, source, step=9, at=at)
    with pytest.raises(MismatchError, match="model/d, model/g"):
        warm_start(mlp(), directory)


def test_a_damaged_newest_step_is_skipped(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        models = [nn.Linear(64, 64).to("jax") for _ in range(2)]
        for step, model in enumerate(models, 1):
            ckpt.save(step, state=dict(model.state_dict()), force=True)
    weight = np.asarray(torchax_backend.buffer(models[1].weight))
    damage(directory / "2", weight.tobytes()[:64])
    fresh = nn.Linear(64, 64).to("jax")
    with pytest.raises(CorruptCheckpointError):
        warm_start(fresh, directory, at="state", step=2)
    with pytest.warns(UserWarning, match="skipping an unreadable checkpoint"):
        report = warm_start(fresh, directory, at="state")
    assert (report.step, report.skipped_steps) == (1, (2,))
    assert_trees_identical(training_state(fresh), training_state(models[0]))


# --- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["hub", "dcp", "run"])
def test_everything_that_differs_is_named_and_nothing_is_touched(form: str, origins: Any) -> None:
    paths, _ = origins
    model: Any = on_jax(Mine(num_classes=5))
    model.scale = torch.zeros((), dtype=torch.bfloat16, device="jax")
    before = training_state(model)
    with pytest.raises(MismatchError) as caught:
        warm_start(model, paths[form], rename={"wte": "head", "h.*.attn": "layers.*.attention"})
    error = caught.value
    assert set(error.missing) == {"model/embed.weight", "model/lora_A.weight"}
    assert error.mismatched == {
        "model/head.weight": "expected float32[5, 16], found float32[32, 16]",
        "model/scale": "expected bfloat16[], found float32[]",
    }
    assert error.step == (7 if form == "run" else None)
    assert_trees_identical(training_state(model), before)
    report = warm_start(
        model, paths[form], rename={"wte": "head", "h.*.attn": "layers.*.attention"}, strict=False
    )
    assert set(report.mismatched) == set(error.mismatched)
    assert report.missing == error.missing
    assert bits(model.layers[0].attention.weight) != before[0]["layers.0.attention.weight"]


def test_weights_without_a_place_are_unexpected(origins: Any) -> None:
    paths, _ = origins
    model = on_jax(Mine())
    with pytest.raises(MismatchError) as caught:
        warm_start(model, paths["hub"], exclude="lora_A", rename={"wte": "embed"})
    assert set(caught.value.unexpected) == {
        f"model/h.{i}.attn.{key}" for i in range(3) for key in ("bias", "weight")
    }
    with pytest.raises(SelectionError, match=r"nothing matches exclude: 'lora_a'"):
        warm_start(model, paths["hub"], exclude="lora_a", rename=RENAME)
    model = on_meta(Mine)  # whose adapter nothing fills
    said = r"model/lora_A\.weight.* Pass warm_start\(init=f\)"
    with pytest.raises(UninitializedLeafError, match=said):
        warm_start(model, paths["hub"], exclude="lora_A", rename=RENAME)
    assert all(p.is_meta for p in model.parameters())


def test_what_is_no_source_and_no_model_is_named(
    directory: Path, origins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (paths, _) = mlp(), origins
    for target, source, arguments, kind, said in (
        (model, directory, {}, StepNotFoundError, "found none of them"),
        (model, paths["hub"], {"step": 3}, SelectionError, "files of weights have no steps"),
        (model, paths["hub"], {"at": "model"}, SelectionError, "neither by torch.save nor"),
        (model, paths["dcp"], {"at": "ema"}, MismatchError, "at 'ema', found 'model'"),
        (model, paths["hub"], {"init": 3}, AttachError, "init: expected a callable"),
        (gpt(), paths["hub"], {}, AttachError, "on the CPU"),
        ({"g": model}, paths["hub"], {}, AttachError, r"expected a torch\.nn\.Module"),
    ):
        with pytest.raises(kind, match=said):
            warm_start(target, source, **arguments)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        warm_start(model, paths["hub"])


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "run", "dcp"])
def test_nothing_is_cast_unless_that_is_asked_for(form: str, tmp_path: Path) -> None:
    stored = np.linspace(-3, 3, 16, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(8, 2)
    if form == "file":
        source = file_of(tmp_path, w=stored)
    elif form == "dcp":
        source = save_dcp({"w": torchax_backend.from_numpy(stored)}, tmp_path / "dcp")
    else:
        origin = nn.Module()
        origin.register_buffer("w", torchax_backend.wrap(jax.numpy.asarray(stored)))
        source = save_run(origin, tmp_path / "run")
    model = nn.Module()
    model.register_buffer("w", torchax_backend.wrap(jax.numpy.zeros((8, 2), np.float32)))
    rule = fsdp_rule(fsdp_mesh())
    with pytest.raises(MismatchError, match=r"expected float32\[8, 2\], found bfloat16\[8, 2\]"):
        warm_start(model, source, shardings=rule)
    warm_start(model, source, shardings=rule, cast=True)
    assert bits(model.w)[1:] == bits(stored.astype(np.float32))[1:]
    array = torchax_backend.buffer(model.w)
    assert array.sharding.is_equivalent_to(rule("w", array), 2)


def test_wide_integers_are_narrowed_only_where_they_fit(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("ids", torchax_backend.wrap(jax.numpy.zeros((3,), np.int32)))
    path = file_of(tmp_path, ids=np.array([1, -(2**31), 2**31 - 1]))
    warm_start(model, path)
    before = bits(model.ids)
    assert before[1:] == bits(np.array([1, -(2**31), 2**31 - 1], np.int32))[1:]
    file_of(tmp_path, ids=np.array([1, 2, 2**31]))
    with pytest.raises(MismatchError, match="ids: expected int64 values that fit into int32"):
        warm_start(model, path)
    assert bits(model.ids) == before
    file_of(tmp_path, ids=np.zeros(3, np.float32))
    with pytest.raises(MismatchError, match="found float32"):
        warm_start(model, path, cast=True)


def test_what_stays_on_the_cpu_stays_there(tmp_path: Path) -> None:
    none = np.zeros((0, 2), np.float32)
    path = file_of(tmp_path, w=np.ones(4, np.float32), ids=np.array([2**40]), none=none)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(4, device="jax")))
    with torchax_backend.native_torch():
        model.register_buffer("ids", torch.zeros(1, dtype=torch.int64))
    model.register_buffer("none", torch.zeros(0, 2, device="jax"))
    ids: Any = model.ids
    warm_start(model, path)
    assert model.ids is ids
    assert bits(ids) == ("torch", "int64", (1,), np.array([2**40]).tobytes())


# --- ties ----------------------------------------------------------------------------------------


def tied(is_tied: bool = True) -> Any:
    model: Any = nn.Module()
    model.a, model.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.to("jax")
    if is_tied:
        model.b.weight = model.a.weight
    return model


@pytest.mark.parametrize(("name", "missing"), [("a", "b"), ("b", "a")])
def test_a_tied_weight_is_found_by_any_name(name: str, missing: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, **{f"{name}.weight": np.ones((2, 2), np.float32)})
    model = tied()
    warm_start(model, path)
    assert model.a.weight is model.b.weight
    assert (np.asarray(torchax_backend.buffer(model.a.weight)) == 1).all()
    with pytest.raises(MismatchError) as caught:
        warm_start(tied(is_tied=False), path)
    assert caught.value.missing == (f"model/{missing}.weight",)


def test_two_values_for_one_tied_weight_are_a_question(tmp_path: Path) -> None:
    arrays = {"a.weight": np.ones((2, 2), np.float32), "b.weight": np.zeros((2, 2), np.float32)}
    path = file_of(tmp_path, **arrays)
    model = tied()
    with pytest.raises(
        MismatchError, match="expected a.weight tied to b.weight, found a.weight on"
    ):
        warm_start(model, path)
    warm_start(model, path, exclude="a")
    assert (np.asarray(torchax_backend.buffer(model.a.weight)) == 0).all()


def test_one_value_does_not_go_to_two_weights(directory: Path) -> None:
    source = save_run(tied(), directory)
    model = tied(is_tied=False)
    with pytest.raises(MismatchError, match="found a.weight tied to b.weight"):
        warm_start(model, source)
    b = bits(model.b.weight)
    warm_start(model, source, exclude="b")
    assert bits(model.b.weight) == b != bits(model.a.weight)


# --- memory --------------------------------------------------------------------------------------


def test_files_pass_the_host_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"w{i}": np.full((256, 256), i, np.float32) for i in range(8)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    with before_enabling(), torch.device("meta"):
        model: Any = nn.Module()
        for name in arrays:
            model.register_parameter(name, nn.Parameter(torch.zeros(256, 256)))
    log = [0]
    read, wait, lock = tensor_files.FileTensor.read, jax.block_until_ready, threading.Lock()
    arrived = 0

    def counted(self: Any, index: Any) -> Any:
        result = read(self, index)
        with lock:
            log.append(log[-1] + result.nbytes)
        return result

    def waited(arrays: Any) -> Any:
        nonlocal arrived
        with lock:
            arrived += 1
            log.append(log[-1] - sum(array.nbytes for array in arrays))
        return wait(arrays)

    monkeypatch.setattr(tensor_files.FileTensor, "read", counted)
    monkeypatch.setattr(jax, "block_until_ready", waited)
    bound = 100_000
    rule = fsdp_rule(fsdp_mesh())
    options = CheckpointOptions(max_host_bytes=bound)
    warm_start(model, tmp_path / "x.safetensors", shardings=rule, options=options)
    assert len(log) - 1 - arrived == 64, "one part for each device"
    assert bound // 2 < max(log) <= bound
    for name, array in arrays.items():
        assert bits(getattr(model, name))[1:] == bits(array)[1:]


SPECS = [P(), P("a"), P("b"), P("a", "b"), P(None, "b"), P(None, ("a", "b")), P(("b", "a"))]


def test_every_sharding_gets_its_parts(tmp_path: Path) -> None:
    """Of tensors that begin at any byte, cast or not, also if a part is not aligned in memory."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    sizes = {"odd": (3,), "matrix": (8, 24), "cube": (8, 8, 3), "large": (64, 64), "scalar": ()}
    random = np.random.default_rng(0)
    model, arrays, shardings = nn.Module(), {}, {}
    for dtype, (i, spec) in itertools.product(("bfloat16", "float32"), enumerate(SPECS)):
        for size, shape in sizes.items():
            name = f"{size}_{dtype}_{i}"
            arrays[name] = random.standard_normal(shape).astype(ml_dtypes.bfloat16)
            shardings[name] = NamedSharding(mesh, P() if size in ("odd", "scalar") else spec)
            empty = jax.numpy.zeros(shape, np.dtype(dtype))
            model.register_buffer(name, torchax_backend.wrap(empty))
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    warm_start(model, tmp_path / "x.safetensors", shardings=lambda n, a: shardings[n], cast=True)
    for name, array in arrays.items():
        live = torchax_backend.buffer(getattr(model, name))
        assert live.sharding == shardings[name]
        assert bits(live)[1:] == bits(array.astype(np.dtype(name.split("_")[1])))[1:], name


@pytest.mark.parametrize(
    ("spec", "num_buffers"), [(P("fsdp"), 1), (P(None, "fsdp"), 8), (P(), 1)], ids=str
)
def test_a_tensor_is_read_once_into_memory_that_its_devices_keep(
    spec: Any, num_buffers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {n: np.full((64, 256), i, np.float32) for i, n in enumerate("ab", 1)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    made: list[np.ndarray] = []

    def counted(shape: Any, dtype: Any) -> np.ndarray:
        made.append(assembly.empty(shape, dtype))
        return made[-1]

    monkeypatch.setattr(tensor_files, "empty", counted)
    monkeypatch.setattr(file_weights, "empty", counted)
    with before_enabling(), torch.device("meta"):
        model: Any = nn.ParameterDict({n: nn.Parameter(torch.zeros(64, 256)) for n in arrays})
    mesh = fsdp_mesh()
    warm_start(model, tmp_path / "x.safetensors", shardings=lambda n, a: NamedSharding(mesh, spec))
    assert len(made) == num_buffers * len(arrays)
    assert sum(array.nbytes for array in made) == sum(array.nbytes for array in arrays.values())
    ranges = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in made]
    for name in arrays:
        for shard in torchax_backend.buffer(model[name]).addressable_shards:
            pointer = shard.data.unsafe_buffer_pointer()
            assert any(low <= pointer < high for low, high in ranges), "it was copied again"


def test_a_donated_array_leaves_what_shares_its_memory(tmp_path: Path) -> None:
    """Eight replicas and, as shards, eight parts of one buffer come from one read."""
    mesh = fsdp_mesh()
    content = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    safetensors.numpy.save_file({"w": content, "v": content}, tmp_path / "x.safetensors")
    model = nn.Module()
    for name in "wv":
        model.register_buffer(name, torchax_backend.wrap(jax.numpy.zeros((8, 128), np.float32)))
    specs = {"w": P(), "v": P("fsdp")}
    rule = lambda name, abstract: NamedSharding(mesh, specs[name])  # noqa: E731
    warm_start(model, tmp_path / "x.safetensors", shardings=rule)

    def step(array: jax.Array) -> jax.Array:  # another value on each device
        return array.at[:].add(1.0 + jax.lax.axis_index("fsdp"))

    for name, spec in specs.items():
        array = torchax_backend.buffer(getattr(model, name))
        kept = [np.array(shard.data) for shard in array.addressable_shards]
        mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        moved = jax.jit(mapped, donate_argnums=0)(array)
        for i, shard in enumerate(moved.addressable_shards):
            assert np.array_equal(np.array(shard.data), kept[i] + 1 + i), (name, i)


def test_a_file_that_ends_too_early_is_damaged(tmp_path: Path) -> None:
    path = file_of(tmp_path, w=np.ones((8, 8), np.float32))
    tensor = safetensors_io.open_safetensors(path).tensors["w"]
    os.truncate(path, path.stat().st_size - 4)
    assert (tensor.read((slice(0, 7), slice(0, 8))) == 1).all()
    with pytest.raises(
        CorruptCheckpointError, match=r"expected 4 more bytes at \d+, found the end"
    ):
        tensor.read((slice(0, 8), slice(0, 8)))
    with pytest.raises(CorruptCheckpointError, match="x.safetensors: .*mmap length"):
        tensor.read((slice(0, 8), slice(0, 7)))


def test_buffers_can_be_freed_first(origins: Any, tmp_path: Path) -> None:
    options = CheckpointOptions(restore_in_budget=True)
    for form in ("hub", "run"):
        model = on_jax(Mine())
        warm_start(model, origins[0][form], exclude="lora_A", rename=RENAME, options=options)
        expect_mine(model, origins[1])
    source = save_hub({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "hub")
    file = source / "model-00002-of-00002.safetensors"
    model = nn.Linear(2, 2).to("jax")
    original = tensor_files.FileTensor.read

    def broken(self: Any, index: Any) -> Any:
        file.write_bytes(b"")
        return original(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files.FileTensor, "read", broken)
        with pytest.raises(UnusableStateError, match="hold no state any more"):
            warm_start(model, source, options=options)


# --- files are data ------------------------------------------------------------------------------


HUGE = b'{"weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.safetensors", b""),
        ("x.safetensors", b"\xff" * 64),
        ("x.safetensors", (2).to_bytes(8, "little") + b"{}" + b"left over"),
        ("x.safetensors", len(HUGE).to_bytes(8, "little") + HUGE + b"\0" * 4),
        (INDEX, b"{"),
        *(
            (INDEX, b'{"weight_map": {"w": "%s"}}' % file)
            for file in (b"../x", b"/x", b"gone", b"x" * 300)
        ),
    ],
)
def test_damaged_files_change_nothing(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    model = mlp()
    before = training_state(model)
    with pytest.raises(CorruptCheckpointError):
        warm_start(model, tmp_path / name)
    assert_trees_identical(training_state(model), before)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 9\n" % (b"0" * 64)


@pytest.mark.parametrize("name", ["x.safetensors", "model.bin", INDEX, "x.distcp/.metadata"])
def test_a_pointer_of_git_lfs_is_named_as_such(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(POINTER)
    with pytest.raises(
        CorruptCheckpointError, match="a pointer of Git LFS.*git lfs pull"
    ) as caught:
        warm_start(mlp(), path.parent if name.endswith(".metadata") else path)
    assert caught.value.file == str(path)


def test_files_of_other_formats_are_named_and_not_called_damaged(tmp_path: Path) -> None:
    array = np.ones(3)
    np.savez(tmp_path / "a.npz", w=array)
    np.savez_compressed(tmp_path / "b.npz", w=array)
    np.save(tmp_path / "c.npy", array)
    (tmp_path / "d.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "e.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    np.savez(tmp_path / "f.pt", w=array)
    kinds = ("an archive of NumPy", "an archive of NumPy", "NumPy", "GGUF", "HDF5", "an archive of")
    (tmp_path / "f.pt.npz").rename(tmp_path / "f.pt")
    for file, kind in zip(sorted(tmp_path.iterdir()), kinds, strict=True):
        with pytest.raises(UnsupportedLeafError, match=f"{file}: expected.*safetensors.*{kind}"):
            warm_start(mlp(), file)


def test_only_regular_files_of_some_size_are_opened(tmp_path: Path) -> None:
    """Links may be, as in Hugging Face's cache; but not to a pipe, which blocks forever."""
    index, pipe = tmp_path / "model.safetensors.index.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    model = mlp()
    for file in ("pipe", "link", "..", ""):
        index.write_text(json.dumps({"weight_map": {"0.weight": file}}))
        with pytest.raises(CorruptCheckpointError, match="special file|is not a file name"):
            warm_start(model, tmp_path)
    index.unlink()
    index.symlink_to(pipe)
    with pytest.raises(CorruptCheckpointError, match="found a folder or special file"):
        safetensors_io.open_safetensors(tmp_path)
    index.unlink()
    with open(index, "wb") as sparse:
        sparse.truncate(tensor_files.MAX_METADATA_BYTES + 1)
    with pytest.raises(CorruptCheckpointError, match="expected at most 268435456 bytes"):
        warm_start(model, tmp_path)


def test_shapes_are_compared_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = b'{"weight":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}'
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)  # sparse
    with pytest.raises(MismatchError, match=r"found uint8\[1099511627776\]"):
        warm_start(nn.Linear(2, 2, bias=False).to("jax"), path)
