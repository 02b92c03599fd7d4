"""torchax from inside: buffers, dtypes, native torch, meta tensors, and the check of all that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torchax
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from make_golden import fingerprint
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp
from support import PROGRAMS, ROOT
from support.compare import bits
from support.processes import run_python
from torch import nn
from torchax.interop import JittableModule
from torchax.tensor import Environment, RuntimeProperty, Tensor
from torchax.view import View

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, torchax_backend
from torchax_ckpt.errors import BackendError

NUMPY_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
}


# --- dtypes ------------------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Any bits in any shape, zero-size and 0-d too."""
    dtype = np.dtype(NUMPY_DTYPES[draw(st.sampled_from(sorted(NUMPY_DTYPES)))])
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


@given(arrays())
def test_every_bit_survives_from_numpy_to_torch_and_back(array: np.ndarray) -> None:
    tensor = torchax_backend.from_numpy(array)
    assert (tensor.device.type, tuple(tensor.shape)) == ("cpu", array.shape)
    assert torchax_backend.numpy_dtype(tensor.dtype) == array.dtype
    with torchax_backend.native_torch():
        assert bits(torchax_backend.to_numpy(tensor)) == bits(array)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "int64", "complex64"])
def test_tensors_of_any_strides_are_read_as_they_look(name: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(NUMPY_DTYPES[name])
    tensor = torchax_backend.from_numpy(array)
    with torchax_backend.native_torch():
        assert bits(torchax_backend.to_numpy(tensor.t())) == bits(array.T)
        assert bits(torchax_backend.to_numpy(tensor[1:, ::2])) == bits(array[1:, ::2])
        assert bits(torchax_backend.to_numpy(tensor[0].expand(2, 4))) == bits(
            np.stack([array[0]] * 2)
        )


def test_conjugated_and_negated_views_are_read_as_they_look() -> None:
    with torchax_backend.native_torch():
        tensor = torch.tensor([1 + 2j, 3 - 4j])
        assert torchax_backend.to_numpy(tensor.conj()).tolist() == [1 - 2j, 3 + 4j]
        assert torchax_backend.to_numpy(tensor.conj().imag).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("name", ["float64", "bfloat16", "float8_e5m2", "int64", "bool"])
def test_conversions_share_no_memory_and_copies_reach_the_views_of_a_tensor(name: str) -> None:
    dtype = NUMPY_DTYPES[name]
    array = np.zeros((2, 2), dtype)
    tensor = torchax_backend.from_numpy(array)
    array[:] = 1
    with torchax_backend.native_torch():
        row, pointer, read = tensor[1], tensor.data_ptr(), torchax_backend.to_numpy(tensor)
    assert bits(read) == bits(np.zeros((2, 2), dtype))
    new = np.array([[0, 1], [1, 0]]).astype(dtype)
    torchax_backend.copy_into(tensor, new)
    new[:] = 0
    assert bits(read) == bits(np.zeros((2, 2), dtype))
    with torchax_backend.native_torch():
        assert tensor.data_ptr() == pointer
        assert bits(torchax_backend.to_numpy(row)) == bits(np.array([1, 0]).astype(dtype))
        parameter = nn.Parameter(torch.zeros(2))
    torchax_backend.copy_into(parameter, np.array([1, 2], np.float32))
    assert parameter.requires_grad
    assert parameter.grad_fn is None


# --- buffers -----------------------------------------------------------------------------------


def test_replacing_a_buffer_keeps_the_parameter_and_shows_in_its_views() -> None:
    parameter = nn.Parameter(torch.zeros(4, device="jax"))
    view = parameter[1:3]
    array = jnp.arange(4, dtype=jnp.float32)
    torchax_backend.set_buffer(parameter, array)
    assert isinstance(parameter, nn.Parameter)
    assert torchax_backend.buffer(parameter) is array
    assert isinstance(view, View)
    assert torchax_backend.buffer(view).tolist() == [1.0, 2.0]


def test_replacing_the_buffer_of_a_view_writes_through() -> None:
    base = torch.zeros(4, device="jax")
    torchax_backend.set_buffer(base[1:3], array := jnp.array([5.0, 6.0]))
    assert torchax_backend.buffer(base).tolist() == [0.0, 5.0, 6.0, 0.0]
    assert torchax_backend.buffer(torchax_backend.wrap(array)) is array


def test_device_tensors_are_told_from_all_others() -> None:
    on_device = torch.ones(2, device="jax")
    assert torchax_backend.is_device_tensor(on_device)
    assert torchax_backend.is_device_tensor(on_device[:1])
    assert torchax_backend.is_device_tensor(nn.Parameter(on_device))
    others = [torch.ones(2), torch.empty(2, device="meta"), jnp.ones(2), np.ones(2), None, 1]
    assert not any(torchax_backend.is_device_tensor(other) for other in others)


# --- native torch ------------------------------------------------------------------------------


def test_native_torch_stays_on_the_cpu_with_its_wide_dtypes_and_torchax_comes_back() -> None:
    torch.ones(2, device="jax") + 1  # after an operation torchax's own switch does nothing
    with torchax_backend.native_torch():
        tensor = torch.tensor([2**40]) * 2
        assert type(tensor) is torch.Tensor
        assert tensor.tolist() == [2**41]
        with pytest.raises(RuntimeError):
            torch.ones(2, device="jax")
    assert torchax_backend.is_device_tensor(torch.ones(2, device="jax") * 2)
    with pytest.raises(KeyError), torchax_backend.native_torch():
        raise KeyError
    assert torchax_backend.is_device_tensor(torch.ones(2, device="jax"))


# --- meta tensors ------------------------------------------------------------------------------


def meta_linear(**arguments: Any) -> nn.Linear:
    # Under enabled torchax, torch.device("meta") builds on jax.
    with torchax_backend.native_torch():
        return nn.Linear(2, 3, device="meta", **arguments)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_filled_meta_parameter_is_the_same_object_everywhere(requires_grad: bool) -> None:
    model = meta_linear()
    weight: Any = model.weight.requires_grad_(requires_grad)
    weight.partition, weight.weight_loader = ("fsdp", None), print
    other = nn.Module()
    other.register_parameter("tied", weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.state[weight]["note"] = 1
    array = jnp.ones((3, 2))
    torchax_backend.fill_meta(weight, array)
    assert model.weight is other.tied is optimizer.param_groups[0]["params"][0] is weight
    kept = {"partition": ("fsdp", None), "weight_loader": print}
    assert kept.items() <= vars(weight).items()
    assert isinstance(weight, nn.Parameter)
    assert torchax_backend.is_device_tensor(weight)
    assert torchax_backend.buffer(weight) is array
    assert weight.requires_grad is requires_grad
    assert optimizer.state[weight] == {"note": 1}
    if requires_grad:
        weight.grad = torch.ones(3, 2, device="jax")
        optimizer.step()
        assert torchax_backend.buffer(model.weight).tolist() == [[0.5, 0.5]] * 3


def test_a_filled_meta_buffer_is_no_parameter() -> None:
    with torchax_backend.native_torch():
        model = nn.BatchNorm1d(3, device="meta")
    buffer: Any = model.running_mean
    torchax_backend.fill_meta(buffer, jnp.zeros(3))
    assert model.running_mean is buffer
    assert not isinstance(buffer, nn.Parameter)
    names = ["running_mean", "running_var", "num_batches_tracked"]
    assert list(dict(model.named_buffers())) == names


# --- random key and wrapped modules ------------------------------------------------------------


def test_the_random_key_that_is_set_is_the_one_that_is_drawn_from() -> None:
    key = jax.random.key(3)
    torchax_backend.set_prng_key(key)
    assert torchax_backend.prng_key() is key
    first = bits(torch.rand(4, device="jax"))
    assert not bool(
        (jax.random.key_data(torchax_backend.prng_key()) == jax.random.key_data(key)).all()
    )
    torchax_backend.set_prng_key(key)
    assert bits(torch.rand(4, device="jax")) == first


def test_a_jittable_module_is_unwrapped_and_any_other_is_left() -> None:
    model = nn.Linear(2, 2).to("jax")
    assert torchax_backend.unwrap_jittable(model) == (model, {})
    wrapped = JittableModule(model)
    assert isinstance(wrapped, nn.Linear), "it claims the wrapped class"
    root, live = torchax_backend.unwrap_jittable(wrapped)
    assert root is model
    assert live.keys() == {"weight", "bias"}


# --- the check ---------------------------------------------------------------------------------


@pytest.fixture
def _check_again() -> Iterator[None]:
    torchax_backend.check_internals.cache_clear()
    yield
    torchax_backend.check_internals.cache_clear()


@pytest.mark.usefixtures("_check_again")
def test_the_installed_torchax_passes_the_check() -> None:
    torchax_backend.check_internals()
    assert torchax_backend.check_internals.cache_info().currsize == 1


@pytest.mark.usefixtures("_check_again")
def test_a_checkpointer_leaves_the_key_to_the_seed_that_the_program_sets_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchax takes its key from torch's seed when its environment is made.
    monkeypatch.setattr(torchax, "_env", None)
    TorchaxCheckpointer(directory).close()
    assert torchax._env is None


def without(kind: Any, name: str) -> Any:
    """A constructor of objects that lack an attribute."""
    original = kind.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        delattr(self, name)

    return init


# What another torchax may have otherwise: where, its name, and what is there; None for nothing.
CHANGES: list[tuple[Any, str, Any]] = [
    (Tensor, "jax", None),
    (Tensor, "jax", lambda self: jnp.zeros(2)),
    (View, "update", None),
    (Environment, "__init__", without(Environment, "_property")),
    (RuntimeProperty, "override", None),
    (Environment, "prng_key", property(lambda self: jax.random.key(0))),
    (JittableModule, "__init__", without(JittableModule, "_model")),
]


@pytest.mark.usefixtures("_check_again")
@pytest.mark.parametrize(("owner", "name", "value"), CHANGES)
def test_a_torchax_without_an_internal_is_refused_with_its_version(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        if value is None:
            patch.delattr(owner, name)
        else:
            patch.setattr(owner, name, value)
        with pytest.raises(BackendError) as caught:
            TorchaxCheckpointer(tmp_path)
    assert f"torchax {torchax.__version__} does not work" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    TorchaxCheckpointer(tmp_path).close()  # a failed check is not remembered


@pytest.mark.slow
def test_without_private_names_all_is_read_and_a_save_says_at_once_what_to_install(
    tmp_path: Path,
) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(ROOT / "tests/golden/v1/attached", golden)
    state = {"n": np.arange(3), "x": jnp.arange(8.0)}
    ocp.save(tmp_path / "v1" / "5", state)
    with v0.CheckpointManager(tmp_path / "v0") as manager:
        manager.save(5, args=v0.args.StandardSave(state))
    runs = [str(path) for path in (golden, tmp_path / "v1", tmp_path / "v0")]
    program = PROGRAMS / "reads_without_internals.py"
    told = json.loads(run_python(program, *runs, fresh=True).stdout.splitlines()[-1])
    expected = {run: fingerprint(TorchaxCheckpointer(run).load()) for run in runs}
    assert told["loaded"] == json.loads(json.dumps(expected))
    assert told["weights"] == json.loads(json.dumps(fingerprint(load_torch_state_dict(golden))))
    assert told["saving"] == told["attaching"]
    assert told["saving"].startswith(f"BackendError: torchax {torchax.__version__} does not work")
    assert "torchax.interop has no call_jax" in told["saving"]
    assert "pip install 'torchax>=0.0.12,<=0.0.13'" in told["saving"]
