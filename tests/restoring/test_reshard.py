"""Another chip layout: the live shardings decide, wherever a checkpoint comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from support.compare import bits
from support.jax_releases import set_mesh
from support.training import (
    P,
    adamw,
    before_enabling,
    fsdp_mesh,
    fsdp_rule,
    place,
    save,
    train_and_save,
    train_step,
)

from torchax_ckpt import TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import MismatchError, UninitializedLeafError


class Net(torch.nn.Module):
    """Dims that divide by eight, by two, and by nothing; a tie; a non-persistent buffer."""

    scale: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.odd = torch.nn.Linear(16, 7)
        self.last = torch.nn.Linear(7, 4)
        self.tied = torch.nn.Module()
        self.tied.weight = self.first.weight
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.register_buffer("mask", torch.ones(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tied: Any = self.tied.weight
        h = torch.tanh(self.first(x)) * self.scale + torch.tanh(x @ tied.T)
        return self.last(torch.tanh(self.odd(h)) * self.mask)


def on_jax(rule: Any = None) -> tuple[Net, torch.optim.Optimizer]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net = Net().to("jax")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if rule is not None:
        place(net, rule)
    return net, adamw(net)


def grid(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("x", "y"))


def reversed_fsdp() -> Any:
    return fsdp_rule(Mesh(np.array(jax.devices()[::-1]), ("fsdp",)))


def tensor_parallel(name: str, abstract: Any) -> NamedSharding:
    """Rows over x, columns over y, where they divide."""
    mesh = grid(2, 4)
    spec = [
        axis if length % mesh.shape[axis] == 0 else None
        for axis, length in zip(("x", "y"), abstract.shape, strict=False)
    ]
    return NamedSharding(mesh, P(*spec))


def replicated(name: str, abstract: Any) -> NamedSharding:
    return NamedSharding(fsdp_mesh(), P())


def one_device(name: str, abstract: Any) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[3])


LAYOUTS = {
    "fsdp8": fsdp_rule(fsdp_mesh(8)),
    "fsdp8_reversed": reversed_fsdp(),
    "fsdp4": fsdp_rule(fsdp_mesh(4)),
    "tp2x4": tensor_parallel,
    "replicated": replicated,
    "one_device": one_device,
    "uncommitted": None,
}


def content(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Bytes of everything, wherever it is."""
    moments = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    tensors = [*net.state_dict().values(), *(m[k] for m in moments for k in sorted(m))]
    return [bits(t) for t in tensors]


class Trained(dict[str, tuple[Path, list[Any]]]):
    """Layout -> the directory of a run trained with it, and its content; trained when asked for."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._tmp_path_factory = tmp_path_factory

    def __missing__(self, layout: str) -> tuple[Path, list[Any]]:
        directory = self._tmp_path_factory.mktemp(layout)
        net, optimizer = on_jax(LAYOUTS[layout])
        train_and_save(directory, net, optimizer)
        self[layout] = (directory, content(net, optimizer))
        return self[layout]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, [*LAYOUTS][i - 4], marks=[pytest.mark.long] * (i >= 4))
        for i, source in enumerate(LAYOUTS)
    ],
)
def test_any_layout_restores_onto_any_other(source: str, target: str, saved: Trained) -> None:
    directory, expected = saved[source]
    net, optimizer = on_jax(LAYOUTS[target])
    before = {n: torchax_backend.buffer(t).sharding for n, t in net.state_dict().items()}
    assert TorchaxCheckpointer(directory).attach(net, optimizer) == 2
    assert content(net, optimizer) == expected
    for name, tensor in net.state_dict().items():
        array = torchax_backend.buffer(tensor)
        assert array.committed == (LAYOUTS[target] is not None)
        assert array.sharding == before[name]
    for name, parameter in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = torchax_backend.buffer(optimizer.state[parameter][key])
            assert moment.sharding == torchax_backend.buffer(parameter).sharding, f"{name} {key}"
    train_step(net, optimizer, 3)  # and training goes on there


def test_shardings_move_a_live_model_and_a_restored_one(saved: Trained, tmp_path: Path) -> None:
    rule = fsdp_rule(fsdp_mesh(4))
    for directory, start in ((saved["fsdp8"][0], 2), (tmp_path / "empty", 0)):
        net, optimizer = on_jax()
        assert TorchaxCheckpointer(directory).attach(net, optimizer, shardings=rule) == start
        for name, tensor in net.state_dict().items():
            assert torchax_backend.buffer(tensor).sharding == rule(name, tensor)


def meta_net() -> tuple[Net, torch.optim.Optimizer]:
    """Built on meta with torchax off, as before ``enable_globally``."""
    with before_enabling(), torch.device("meta"):
        net = Net()
    return net, adamw(net)


def zeros(name: str, abstract: jax.ShapeDtypeStruct) -> Any:
    return np.zeros(abstract.shape, abstract.dtype)


def test_a_meta_module_is_filled_with_ties_and_references_kept(saved: Trained) -> None:
    directory, expected = saved["fsdp8"]
    net, optimizer = meta_net()
    parameters = dict(net.named_parameters())
    rule = fsdp_rule(fsdp_mesh(4))
    asked: list[str] = []

    def init(name: str, abstract: jax.ShapeDtypeStruct) -> Any:
        asked.append(name)
        return np.ones(abstract.shape, abstract.dtype)

    assert TorchaxCheckpointer(directory).attach(net, optimizer, shardings=rule, init=init) == 2
    assert asked == ["mask"]  # the one tensor that no checkpoint supplies
    assert content(net, optimizer) == expected
    assert net.tied.weight is net.first.weight
    assert all(p is parameters[n] for n, p in net.named_parameters())
    assert optimizer.param_groups[0]["params"] == list(parameters.values())
    for name, parameter in parameters.items():
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad
        assert torchax_backend.buffer(parameter).sharding == rule(name, parameter)
        assert torchax_backend.buffer(optimizer.state[parameter]["exp_avg"]).sharding == rule(
            name, parameter
        )


def test_no_device_holds_a_full_copy(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = fsdp_rule(fsdp_mesh(8))
    with before_enabling(), torch.device("meta"):
        net = torch.nn.Linear(64, 64, bias=False)
    save(directory, net, shardings=rule, init=zeros)
    seen: list[Any] = []
    put = jax.device_put

    def noted(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(x)
        return put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", noted)
    with before_enabling(), torch.device("meta"):
        fresh = torch.nn.Linear(64, 64, bias=False)
    TorchaxCheckpointer(directory).attach(fresh, shardings=rule)
    shards = torchax_backend.buffer(fresh.weight).addressable_shards
    assert {s.data.shape for s in shards} == {(8, 64)}
    assert len({s.device for s in shards}) == 8
    # Nothing of the weight's size went through a transfer of this library's.
    assert all(np.size(leaf) < 64 * 64 for leaf in jax.tree.leaves(seen))


def test_init_fills_a_first_start(directory: Path) -> None:
    net, optimizer = meta_net()
    rule = fsdp_rule(fsdp_mesh(8))
    abstracts = {}

    def init(name: str, abstract: jax.ShapeDtypeStruct) -> Any:
        abstracts[name] = abstract
        # Made on its devices, shard by shard.
        return jax.jit(lambda: jax.numpy.ones(abstract.shape), out_shardings=abstract.sharding)()

    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(net, optimizer, shardings=rule, init=init) == 0
    assert net.tied.weight is net.first.weight
    assert set(abstracts) == {n for n, _ in net.named_parameters()} | {"scale", "mask"}
    assert abstracts["first.weight"].sharding == rule("", abstracts["first.weight"])


def test_a_meta_tensor_that_nobody_fills_is_named(directory: Path) -> None:
    net, optimizer = meta_net()
    with pytest.raises(UninitializedLeafError, match=r"model/odd\.bias.*init="):
        TorchaxCheckpointer(directory).attach(net, optimizer)
    decline = lambda name, abstract: None if name == "mask" else zeros(name, abstract)  # noqa: E731
    with pytest.raises(UninitializedLeafError, match="1 tensor is .* model/mask"):
        TorchaxCheckpointer(directory).attach(net, optimizer, init=decline)
    cast = lambda name, abstract: np.zeros(abstract.shape, np.float16)  # noqa: E731
    with pytest.raises(UninitializedLeafError, match=r"expected float32\[16, 8\]"):
        TorchaxCheckpointer(directory).attach(net, optimizer, init=cast)
    assert all(p.is_meta and not torchax_backend.is_device_tensor(p) for p in net.parameters())


def test_torchax_sharders_and_meshes_are_accepted(directory: Path) -> None:
    from torchax import mesh_util

    with before_enabling(), torch.device("meta"):
        net = torch.nn.Linear(16, 24)
    sharder = mesh_util.SingleAxisSharder("fsdp", 8)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(net, shardings=sharder, init=zeros)
        assert torchax_backend.buffer(net.weight).sharding == NamedSharding(
            fsdp_mesh(), P("fsdp", None)
        )
        ckpt.save(1, force=True)
    other = torch.nn.Linear(16, 24).to("jax")
    TorchaxCheckpointer(directory).attach(other, shardings=mesh_util.Mesh.fsdp_mesh())
    assert torchax_backend.buffer(other.weight).sharding == NamedSharding(
        fsdp_mesh(), P("fsdp", None)
    )
    torch.relu(other.weight)  # on Auto axes: torchax's operations work


def test_a_partition_spec_uses_the_ambient_mesh(directory: Path) -> None:
    net = torch.nn.Linear(16, 24).to("jax")
    mesh = grid(2, 4)
    with set_mesh(mesh):
        TorchaxCheckpointer(directory).attach(net, shardings=lambda n, a: P(*["y"][: len(a.shape)]))
    assert torchax_backend.buffer(net.weight).sharding == NamedSharding(mesh, P("y"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (NamedSharding(fsdp_mesh(), P("fsdp")), r"odd\.weight.*\(7, 16\) cannot be sharded"),
        (P("a", "b"), "no mesh is known"),
        ("fsdp", "must return a jax Sharding"),
    ],
)
def test_a_sharding_that_misfits_is_named(answer: Any, message: str, directory: Path) -> None:
    net, _ = on_jax()
    before = content(net, torch.optim.SGD(net.parameters()))
    rule = lambda name, abstract: answer if name == "odd.weight" else replicated(name, abstract)  # noqa: E731
    with pytest.raises(MismatchError, match=message):
        TorchaxCheckpointer(directory).attach(net, shardings=rule)
    assert content(net, torch.optim.SGD(net.parameters())) == before
    assert not torchax_backend.buffer(net.first.weight).committed
