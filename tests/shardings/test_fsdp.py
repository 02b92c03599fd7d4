"""The rule of fully sharded data parallel: what it shards, and who takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from support.compare import assert_trees_identical, bits
from support.training import P, adamw, fsdp_mesh, mlp, save_state, train_and_save
from torchax.mesh_util import Mesh as TorchaxMesh

from torchax_ckpt import TorchaxCheckpointer, shardings, torchax_backend
from torchax_ckpt.errors import ArgumentError, AttachError, MismatchError
from torchax_ckpt.planning.topology_plan import fsdp_and_tp

BOTH = ("slice", "fsdp")


def slices(rows: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(rows, -1), BOTH)


@pytest.mark.parametrize(
    ("shape", "spec", "on_slices", "within_slices"),
    [
        ((8, 24), P(None, "fsdp"), P(None, BOTH), P(None, "fsdp")),
        ((24, 8), P("fsdp"), P(BOTH), P("fsdp")),
        ((16, 16), P("fsdp"), P(BOTH), P("fsdp")),  # the first of equally long ones
        ((8, 25), P("fsdp"), P(BOTH), P("fsdp")),  # not the longest
        ((5, 40), P(None, "fsdp"), P(None, BOTH), P(None, "fsdp")),
        ((2, 2, 8), P(None, None, "fsdp"), P(None, None, BOTH), P(None, None, "fsdp")),
        ((8,), P("fsdp"), P(BOTH), P("fsdp")),  # one element on each device
        ((4,), P(), P(), P("fsdp")),  # fewer elements than devices
        ((7, 9), P(), P(), P()),
        ((1, 1), P(), P(), P()),
        ((), P(), P(), P()),
        ((0, 24), P(None, "fsdp"), P(None, BOTH), P(None, "fsdp")),
        ((0,), P(), P(), P()),
    ],
)
def test_the_longest_dim_that_the_devices_divide_is_sharded(
    shape: tuple[int, ...], spec: P, on_slices: P, within_slices: P
) -> None:
    leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    wanted = (
        (fsdp_mesh(), (), spec),
        (slices(), (), on_slices),
        (slices(), ("fsdp",), within_slices),
        (slices(1), (), spec),  # an axis of one device shards nothing
        (fsdp_mesh(1), (), P()),
    )
    for mesh, axes, expected in wanted:
        sharding = shardings.fsdp(mesh, *axes)("name", leaf)
        assert sharding == NamedSharding(mesh, expected), (mesh, axes)
        sharding.shard_shape(shape)  # it fits
    # One rule: what a plan of two slices assumes.
    planned = fsdp_and_tp(shape, {"slice": 2, "fsdp": 4})
    assert planned == P(*within_slices, *[None] * (len(shape) - len(within_slices)))


@pytest.mark.parametrize("axes", [(), ("fsdp",)])
def test_a_model_is_attached_with_the_rule(axes: tuple[str, ...], directory: Path) -> None:
    model = mlp(width=20)  # dims that 8, or only 4, or nothing divides
    optimizer = adamw(model)
    train_and_save(directory, model, optimizer)
    rule = shardings.fsdp(slices(), *axes)
    again = mlp(width=20)
    moments = adamw(again)
    assert TorchaxCheckpointer(directory).attach(again, moments, shardings=rule) == 2
    specs = set()
    for name, tensor in again.named_parameters():
        assert bits(tensor) == bits(model.get_parameter(name))
        array = torchax_backend.buffer(tensor)
        assert array.sharding == rule(name, tensor)
        assert torchax_backend.buffer(moments.state[tensor]["exp_avg"]).sharding == array.sharding
        specs.add(rule(name, tensor).spec)
    sharded = {P("fsdp"), P(None, "fsdp")} if axes else {P(None, BOTH), P()}
    assert sharded <= specs


def test_a_pytree_is_placed_and_loaded_with_the_rule(directory: Path) -> None:
    def init() -> dict[str, Any]:
        return {"w": jnp.arange(48.0).reshape(2, 24), "b": jnp.ones(3), "step": jnp.zeros((), int)}

    rule = shardings.fsdp(fsdp_mesh())
    where = jax.tree_util.tree_map_with_path(rule, jax.eval_shape(init))
    assert {name: sharding.spec for name, sharding in where.items()} == {
        "w": P(None, "fsdp"),
        "b": P(),
        "step": P(),
    }
    state = jax.jit(init, out_shardings=where)()
    save_state(directory, init())  # on one device
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, where
    )
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, abstract_state=abstract), state)


@pytest.mark.parametrize(
    ("mesh", "axes", "message"),
    [
        (8, (), "mesh: expected a jax.sharding.Mesh, found a builtins.int; give Mesh"),
        (TorchaxMesh.fsdp_mesh(), (), "found a torchax.mesh_util.Mesh; give its jax_mesh"),
        (None, ("tp",), "has slice, fsdp, found 'tp'; name some of these, or none"),
        (None, ("fsdp", "fsdp"), "expected each axis once, found fsdp, fsdp"),
    ],
)
def test_what_is_no_mesh_or_no_axis_of_it_is_refused(
    mesh: Any, axes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        shardings.fsdp(mesh or slices(), *axes)


def test_what_is_no_rule_or_does_not_fit_a_tensor_is_refused_by_name(directory: Path) -> None:
    mesh, model = fsdp_mesh(), mlp()
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises(AttachError, match=r"such as torchax_ckpt.shardings.fsdp\(mesh\)"):
            ckpt.attach(model, shardings=mesh)
        wide = NamedSharding(mesh, P(None, None, "fsdp"))
        with pytest.raises(MismatchError, match=r"weight: shape .* it has 3 dims, the leaf 2"):
            ckpt.attach(model, shardings=lambda name, leaf: wide)


def test_numbers_of_python_are_replicated() -> None:
    rule = shardings.fsdp(fsdp_mesh())
    found = jax.tree_util.tree_map_with_path(rule, {"n": 3, "w": np.ones(8)})
    assert (found["n"].spec, found["w"].spec) == (P(), P("fsdp"))
