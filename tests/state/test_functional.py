"""Functional state: whatever a jitted step takes and returns, donated buffers included."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torchax
from jax.sharding import NamedSharding, SingleDeviceSharding
from support.compare import assert_trees_identical, bits
from support.damage import edit_json
from support.models import Counter
from support.strategies import fingerprint, make_leaf
from support.training import P, fsdp_mesh, mlp, resume, save, save_state, train_step

from torchax_ckpt import TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import MismatchError, UnsupportedLeafError
from torchax_ckpt.layout import nodes

State = tuple[dict[str, jax.Array], Any]


Pair = collections.namedtuple("Pair", ["x", "y"])


def optimizer() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def initial(width: int = 8) -> State:
    params = {
        "b": jnp.zeros(width, jnp.bfloat16),
        "w": jnp.linspace(-1, 1, 8 * width).reshape(8, width),
    }
    return params, optimizer().init(params)


@functools.cache
def make_step(*, donates: bool = False) -> Callable[[State, int], State]:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    def step(state: State, seed: jax.Array) -> State:
        params, opt_state = state
        x = jax.random.normal(jax.random.key(seed), (4, 8))
        grads = jax.grad(loss)(params, x)
        updates, opt_state = optimizer().update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=(0,) if donates else ())


def abstract(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def load(directory: Path, abstract_state: Any = None) -> Any:
    return TorchaxCheckpointer(directory).load(abstract_state=abstract_state)


@pytest.mark.parametrize("kind", ["arrays", "shapes", "donated"])
def test_optax_training_goes_on_as_if_never_interrupted(directory: Path, kind: str) -> None:
    step = make_step(donates=True)
    state = initial()
    with TorchaxCheckpointer(directory) as ckpt:
        for number in range(1, 10):
            state = step(state, number)
            if number == 4:
                ckpt.save(number, state=state)
    template = initial()
    if kind == "shapes":
        template = jax.eval_shape(initial)
    if kind == "donated":
        step(template, 0)
    with TorchaxCheckpointer(directory) as ckpt:
        start = ckpt.attach()
        resumed = ckpt.load(abstract_state=template)
    assert start == 4
    for number in range(start + 1, 10):
        resumed = step(resumed, number)
    assert_trees_identical(resumed, state)


def test_a_state_on_a_mesh_is_loaded_onto_another(directory: Path) -> None:
    state = make_step()(initial(), 1)
    rows = NamedSharding(fsdp_mesh(8), P("fsdp"))
    whole = NamedSharding(fsdp_mesh(8), P())
    sharded = jax.tree.map(lambda x: jax.device_put(x, rows if x.ndim else whole), state)
    save_state(directory, sharded)
    on_four, on_one = NamedSharding(fsdp_mesh(4), P()), SingleDeviceSharding(jax.devices()[5])
    for sharding in (on_four, on_one, None):
        wanted = jax.device_put(jax.tree.map(np.asarray, state), sharding)
        assert_trees_identical(load(directory, abstract(state, sharding)), wanted)
    assert_trees_identical(load(directory, sharded), sharded)


def test_leaves_deleted_or_changed_right_after_save_are_saved_as_they_were(directory: Path) -> None:
    sharding = NamedSharding(fsdp_mesh(), P("fsdp"))
    state: dict[str, Any] = {
        "jax": jnp.arange(1000.0) + 1,
        "key": jax.random.fold_in(jax.random.key(0), 1),
        "numpy": np.arange(1000),
        "sharded": jax.device_put(np.arange(64), sharding),
        "torch": torchax_backend.from_numpy(np.arange(1000)),
        "torchax": torchax_backend.wrap(jnp.arange(10) * 2),
    }
    wanted, python = {k: bits(v) for k, v in state.items()}, [1]
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={**state, "python": python})
        for name in ("jax", "key", "sharded"):
            state[name].delete()
        torchax_backend.buffer(state["torchax"]).delete()
        state["numpy"][:] = -1
        _zero(state["torch"])
        python.append(2)
    found = load(directory)
    assert found.pop("python") == [1]
    assert {k: bits(v) for k, v in found.items()} == wanted


def test_a_buffer_that_was_donated_before_save_is_refused_by_name(directory: Path) -> None:
    array, key = jnp.ones((4, 2)) + 1, jax.random.fold_in(jax.random.key(0), 1)
    tensor = torchax_backend.wrap(array)
    view = tensor[1:]
    array.delete()
    key.delete()
    with TorchaxCheckpointer(directory) as ckpt:
        for leaf in (array, tensor, view, key):
            with pytest.raises(UnsupportedLeafError, match="state/gone/0.*donated") as caught:
                ckpt.save(1, state={"fine": jnp.ones(2), "gone": [leaf]})
            assert caught.value.key_path == "state/gone/0"
            assert not ckpt.all_steps()
        assert ckpt.save(1, state={"fine": jnp.ones(2)})


def test_values_that_were_changed_in_place_are_saved_anew(directory: Path) -> None:
    values: list[tuple[Any, Callable[[Any], Any]]] = [
        ({1}, lambda v: v.add(2)),
        (collections.Counter(a=1), lambda v: v.update(b=1)),
        ([1], lambda v: v.append(2)),
        (np.ones(2), lambda v: v.fill(2)),
        (torchax_backend.from_numpy(np.ones(2)), _zero),
        ({"b": b"1"}, lambda v: v.update(b=b"2")),
    ]
    changing = [value for value, _ in values]
    state = {"w": jnp.ones(2), "x": changing}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state)
        ckpt.wait_until_finished()
        before = list(map(fingerprint, ckpt.load(1)["x"]))
        for value, change in values:
            change(value)
        ckpt.save(2, state=state, force=True)
    assert fingerprint(load(directory)["x"]) == fingerprint(changing)
    assert not any(map(operator.eq, before, map(fingerprint, changing)))


def _zero(tensor: torch.Tensor) -> None:
    with torchax_backend.native_torch():
        tensor.zero_()


def test_the_abstract_state_says_what_kind_of_leaf_comes_back(directory: Path) -> None:
    value = np.arange(8, dtype=np.float32)
    array = jax.device_put(value, NamedSharding(fsdp_mesh(), P("fsdp")))
    gone = torchax_backend.wrap(jnp.zeros(8) + 1)
    torchax_backend.buffer(gone).delete()
    kinds = {
        "jax": jax.device_put(value),
        "numpy": value,
        "sharded": torchax_backend.wrap(array),
        "torch": torchax_backend.from_numpy(value),
        "torchax": torchax_backend.wrap(jax.device_put(value)),
    }
    save_state(directory, {f"{one} as {other}": kinds[one] for one in kinds for other in kinds})
    wanted = {f"{one} as {other}": kinds[other] for one in kinds for other in kinds}
    asked = {name: gone if name.endswith("as torchax") else leaf for name, leaf in wanted.items()}
    assert_trees_identical(load(directory, asked), wanted)


def test_shapes_of_random_keys_and_deleted_ones_are_abstract_leaves_too(directory: Path) -> None:
    sharding = NamedSharding(fsdp_mesh(), P("fsdp"))
    keys = {
        "deleted": jax.device_put(make_leaf("key", "rbg", (8,), 2), sharding),
        "one": make_leaf("key", "threefry2x32", (), 1),
        "sharded": jax.device_put(make_leaf("key", "rbg", (8,), 2), sharding),
    }
    save_state(directory, keys)
    deleted = jax.device_put(make_leaf("key", "rbg", (8,), 3), sharding)
    deleted.delete()
    shapes = {
        "deleted": deleted,
        "one": jax.ShapeDtypeStruct((), keys["one"].dtype),
        "sharded": jax.ShapeDtypeStruct((8,), keys["sharded"].dtype, sharding=sharding),
    }
    assert_trees_identical(load(directory, shapes), keys)


Node = collections.namedtuple("Node", ["left", "right"])


def test_an_abstract_state_gives_the_structure_of_the_result(directory: Path) -> None:
    """To JAX, a set and a Counter are leaves; what is in them may be numpy's."""
    state = {
        "counter": collections.Counter({"a": np.int64(3)}),
        "huge ints": {2**60: np.ones(2), 1: np.zeros(2), -(2**80): np.ones(1)},
        "int keys": {1: np.ones(1), 2: "two"},
        "list": [np.zeros(1), None, ()],
        "named": Node(np.ones(2), Node(1, "x")),
        "ordered": collections.OrderedDict([("b", np.ones(3)), ("a", 2**70)]),
        "tuple keys": {("a", 1): np.ones(4)},
    }
    members = {np.int16(1)}
    values = {"bytes": b"x", "epoch": 3, "name": "a", "rate": 0.1, "z": 1j}
    save_state(directory, {**state, "set": members, "values": values})
    others = {"bytes": b"", "epoch": 0, "name": "", "rate": 0.0, "z": 0j}
    loaded = load(directory, {**state, "set": members, "values": others})
    assert loaded.pop("values") == values  # Python's values come from the checkpoint
    assert [type(member) for member in loaded.pop("set")] == [np.int16]
    huge = loaded.pop("huge ints")
    assert {key: bits(array) for key, array in huge.items()} == {
        key: bits(array)
        for key, array in state.pop("huge ints").items()  # type: ignore[attr-defined]
    }
    assert_trees_identical(loaded, state)


def test_an_abstract_state_may_have_keys_that_python_cannot_sort(directory: Path) -> None:
    keys: list[list[Any]] = [[1, "b"], [1, "1", "1 (int)"], [(1, "a"), ("b", 2), None]]
    trees = [{k: jnp.array([n, i]) for i, k in enumerate(every)} for n, every in enumerate(keys)]
    state: dict[Any, Any] = {"x": trees, Pair(1, 2): 0}
    save_state(directory, state)
    reversed_ = {"x": [dict(reversed(tree.items())) for tree in state["x"]], Pair(1, 2): 5}
    assert_trees_identical(load(directory, reversed_), state | {"x": reversed_["x"]})
    lacking = {"x": [{1: 0}, *state["x"][1:]], Pair(1, 2): 0}
    with pytest.raises(MismatchError, match="state/x/0/b") as caught:
        load(directory, lacking)
    assert caught.value.unexpected == ("state/x/0/b",)


def test_an_abstract_state_that_no_state_can_be_is_refused_by_name(directory: Path) -> None:
    save_state(directory, {"n": 1})
    looped: list[Any] = []
    looped.append(looped)
    with pytest.raises(MismatchError, match="abstract_state: nested deeper than 100 levels"):
        load(directory, looped)
    with pytest.raises(UnsupportedLeafError, match="^state/n: a builtins.object cannot be stored"):
        load(directory, {"n": object()})


def test_an_abstract_mesh_becomes_the_one_that_the_program_sets(directory: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        init = jax.jit(lambda: {"w": jnp.arange(16.0, out_sharding=P("data"))})
        state = init()
        save_state(directory, state)
        shapes = jax.eval_shape(init)
        assert_trees_identical(load(directory, shapes), state)
    others: list[Any] = [
        contextlib.nullcontext(),
        jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))),
    ]
    for other in others:
        with other, pytest.raises(MismatchError, match="state/w: its sharding in abstract_state"):
            load(directory, shapes)


def test_each_part_of_what_is_stored_is_looked_through_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 500
    state = {"layers": [{f"{i:03}": jnp.ones(2) for i in range(count)}] * 2}
    save_state(directory, state)
    looks = 0
    key = nodes.key_of

    def counted(node: Any) -> Any:
        nonlocal looks
        looks += 1
        return key(node)

    monkeypatch.setattr(nodes, "key_of", counted)
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state), state, shardings=False)
    assert looks <= 2 * 2 * (count + 1)  # for what is asked for, and for what else there is


def test_all_that_differs_is_in_one_error_with_its_name(directory: Path) -> None:
    one, two = jnp.ones(1), jnp.ones(2)
    pairs: dict[str, tuple[Any, Any]] = {  # what is stored, and what is asked for
        "dtype": (two, jnp.ones(2, jnp.bfloat16)),
        "fine": (two, two),
        "form": ([one], one),
        "impl": (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="threefry2x32")),
        "key": (jnp.ones((2,), jnp.uint32), jax.random.key(0)),
        "list": ((one, one), (one, one, one)),
        "python": (jnp.ones(()), 1.0),
        "shape": (jnp.ones((2, 3)), jnp.ones((3, 2))),
        "value": (5, jnp.ones(())),
    }
    stored = {name: pair[0] for name, pair in pairs.items()} | {"x/y": {"extra": one}}
    asked = {"absent": two, **{name: pair[1] for name, pair in pairs.items()}}
    save_state(directory, stored, step=7)
    with pytest.raises(MismatchError) as caught:
        TorchaxCheckpointer(directory).load(7, asked)
    error = caught.value
    assert sorted(error.missing) == ["state/absent", "state/list/2"]
    assert sorted(error.unexpected) == ["state/x%2Fy/extra"]
    assert error.mismatched.keys() == {f"state/{name}" for name in pairs.keys() - {"fine", "list"}}
    assert error.mismatched["state/dtype"] == "expected bfloat16[2], found float32[2]"
    assert error.mismatched["state/shape"] == "expected float32[3, 2], found float32[2, 3]"
    for name in (*error.missing, *error.unexpected, *error.mismatched):
        assert name in str(error)
    assert "abstract_state" in str(error)
    assert (error.step, error.path) == (7, str(directory / "7"))


def test_a_python_value_of_another_type_or_that_nothing_takes_is_a_mismatch(
    directory: Path,
) -> None:
    found = ["text", {"a": 1}, {"a": np.ones(1)}, [1], (1,), None, np.float32(1)]
    save_state(directory, {"found": found, "w": jnp.ones(1)})
    for index, expected in enumerate((0, 1.0, 1.0, "", "", 0, 0)):
        asked = {"found": [*found[:index], expected, *found[index + 1 :]], "w": jnp.ones(1)}
        with pytest.raises(MismatchError) as caught:
            load(directory, asked)
        assert f"state/found/{index}" in caught.value.mismatched
    with pytest.raises(MismatchError) as caught:
        load(directory, {"w": jnp.ones(1)})
    assert {"state/found/0", "state/found/1/a"} <= set(caught.value.unexpected)


def test_random_state_and_stateful_objects_are_saved_with_a_functional_state(
    directory: Path,
) -> None:
    counter = Counter()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={"counter": counter})
        counter.count = 5
        torchax.default_env().manual_seed(11)
        random.seed(12)
        np.random.seed(13)
        ckpt.save(2, state={"w": jnp.ones(2)})
        counter.count = 6
        wanted = [random.random(), np.random.rand(), bits(torchax_backend.prng_key())]
    for seed in (random.seed, np.random.seed, torchax.default_env().manual_seed):
        seed(99)
    fresh = Counter()
    assert resume(directory, stateful={"counter": fresh}) == 2
    assert fresh.count == 5
    assert [random.random(), np.random.rand(), bits(torchax_backend.prng_key())] == wanted


def test_attached_modules_are_not_captured_beside_a_functional_state(directory: Path) -> None:
    """Their buffers may be donated and gone."""
    model = mlp()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, torch.optim.AdamW(model.parameters()))
        state = {n: jnp.array(torchax_backend.buffer(p)) for n, p in model.named_parameters()}
        for parameter in model.parameters():
            torchax_backend.buffer(parameter).delete()
        ckpt.save(1, state=state)
    assert_trees_identical(load(directory), state)
    fresh = mlp()
    with TorchaxCheckpointer(directory) as ckpt:
        before = {n: bits(p) for n, p in fresh.named_parameters()}
        assert ckpt.attach(fresh, torch.optim.AdamW(fresh.parameters())) == 1
        assert {n: bits(p) for n, p in fresh.named_parameters()} == before


HOLDS = (
    r"The step holds what save\(state=\) was given \(params, n\), in place of modules and "
    r"optimizers: load\(1, abstract_state\) returns it\."
)


def save_besides(directory: Path, *attached: Any) -> None:
    """Saves a functional state, with these objects attached."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(*attached)
        ckpt.save(1, state={"params": {"w": jnp.ones(2)}, "n": 3}, force=True)


def test_attach_refuses_a_step_whose_functional_state_was_saved_without_the_model(
    directory: Path,
) -> None:
    save_besides(directory)
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {n: bits(p) for n, p in model.named_parameters()}
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises(MismatchError, match=HOLDS) as caught:
            ckpt.attach({"net": model}, optim)
        assert caught.value.missing == ("model", "optimizer")
        ckpt.attach(model, optim, resume=False)
        with pytest.raises(MismatchError, match=HOLDS):
            ckpt.restore(1)
        assert ckpt.restore(1, strict=False).missing == ("model", "optimizer")
        assert ckpt.load(1, {"params": {"w": jnp.zeros(2)}, "n": 0})["n"] == 3
    assert {n: bits(p) for n, p in model.named_parameters()} == before


def test_an_optimizer_that_was_not_attached_beside_the_model_is_missing(directory: Path) -> None:
    save_besides(directory, mlp())
    model = mlp()
    assert resume(directory, model) == 1
    with pytest.raises(MismatchError, match=HOLDS) as caught:
        resume(directory, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert caught.value.missing == ("optimizer",)


def test_each_member_that_was_not_attached_beside_the_state_is_missing(directory: Path) -> None:
    def built(*names: str) -> list[dict[str, Any]]:
        models: dict[str, Any] = {name: mlp() for name in names}
        return [models, {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in models.items()}]

    save_besides(directory, *built("generator", "critic"))
    for fitting in (["generator", "critic"], ["critic"]):
        assert resume(directory, *built(*fitting)) == 1
    with pytest.raises(MismatchError, match=HOLDS) as caught:
        resume(directory, *built("generator", "discriminator"))
    assert caught.value.missing == ("model/discriminator", "optimizer/discriminator")
    with pytest.raises(MismatchError, match=HOLDS) as caught:  # one model in place of several
        resume(directory, model := mlp(), {"sgd": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert caught.value.missing == ("optimizer/sgd",)


def test_a_step_that_does_not_say_what_was_attached_gives_one_warning(directory: Path) -> None:
    save_besides(directory)
    edit_json(directory / "1" / "manifest" / "data.json", lambda m: m.pop("attached"))
    model = mlp()
    with pytest.warns(UserWarning, match=f"not restored: model. {HOLDS}") as said:
        assert resume(directory, model) == 1
    assert len(said) == 1


def test_load_gives_attached_modules_and_optimizers_by_component(directory: Path) -> None:
    model = mlp()
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    train_step(model, optim, 0)
    save(directory, model, optim)
    loaded = load(directory)
    assert loaded.keys() == {"model", "optimizer", "rng"}
    assert_trees_identical(loaded["model"], dict(model.state_dict()), shardings=False)
    names = [name for name, _ in model.named_parameters()]
    moments = {name: dict(optim.state[p]) for name, p in model.named_parameters()}
    assert_trees_identical(loaded["optimizer"]["state"], moments, shardings=False)
    (group,) = loaded["optimizer"]["param_groups"]
    assert (group["params"], group["lr"]) == (names, 0.5)

    sharding = NamedSharding(fsdp_mesh(4), P())
    shapes = {n: torchax_backend.buffer(p) for n, p in sorted(model.named_parameters())}
    save(directory / "model", model, rng=False)
    found = load(directory / "model", {"model": abstract(shapes, sharding)})
    wanted = {"model": {n: jax.device_put(a, sharding) for n, a in shapes.items()}}
    assert_trees_identical(found, wanted)
    with pytest.raises(MismatchError) as caught:
        load(directory / "model", {"model": {"0.weight": shapes["0.weight"]}, "ema": jnp.ones(1)})
    assert caught.value.missing == ("ema",)
    assert sorted(caught.value.unexpected) == ["model/0.bias", "model/2.bias", "model/2.weight"]
