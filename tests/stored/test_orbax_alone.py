"""Both ways without this package: its steps read by bare Orbax, and bare Orbax's steps by it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as v0
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp
from support.compare import assert_trees_identical, bits
from support.damage import edit_json
from support.linked import by_orbax
from support.processes import run_python
from support.steps import save_states
from support.strategies import JAX_DTYPES, NUMPY_DTYPES, random_bits
from support.training import P, fsdp_mesh, fsdp_rule, mlp, train_step

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import CorruptCheckpointError, ForeignCheckpointError, MismatchError
from torchax_ckpt.options import Codec

# --- a step of this package, seen through Orbax alone ------------------------------------------


@dataclasses.dataclass
class Run:
    """What was attached, as it was saved, and the directory of the step."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: Path
    options: CheckpointOptions


@pytest.fixture(
    scope="module",
    params=["auto", pytest.param("flat", marks=pytest.mark.slow)],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model with equal layers on 8 devices, trained one step and saved; no test changes it."""
    directory = tmp_path_factory.mktemp("run")
    sizes = [8, 16, 16, 16, 4]
    layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*layers).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(model, optimizer, 0)  # on one device, because a step on eight takes longer
    options = CheckpointOptions(layout=request.param)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.attach(model, optimizer, shardings=fsdp_rule(fsdp_mesh()))
        ckpt.save(1, force=True)
    return Run(model, optimizer, directory / "1", options)


def arrays_of(metadata: Any) -> dict[str, Any]:
    """Component and name, joined with a slash -> what Orbax says of the array."""
    return {
        f"{component}/{name}" if name else component: leaf
        for component, leaves in metadata.items()
        for name, leaf in leaves.items()
    }


def array_nodes(node: Any) -> list[dict[str, Any]]:
    """The objects of a manifest that describe an array, found as anyone with JSON would."""
    children = node if isinstance(node, list) else list(node.values())
    below = [leaf for c in children if isinstance(c, (list, dict)) for leaf in array_nodes(c)]
    return [*([node] if isinstance(node, dict) and "array" in node else []), *below]


def read_manifest(step: Path) -> dict[str, Any]:
    return ocp.load_checkpointables(step, {"manifest": None})["manifest"]


@pytest.mark.slow
def test_orbax_alone_sees_arrays_under_torch_names(run: Run) -> None:
    metadata = ocp.checkpointables_metadata(run.step).metadata["state"]
    shapes = {name: leaf.shape for name, leaf in metadata["model"].items()}
    if run.options.layout == "flat":
        assert shapes == {n: tuple(p.shape) for n, p in run.model.named_parameters()}
        assert metadata["optimizer"].keys() == {
            f"{name}/{what}" for name in shapes for what in ("exp_avg", "exp_avg_sq", "step")
        }
        return
    assert shapes == {
        "0.weight": (16, 8),
        "*.weight": (2, 16, 16),  # 1.weight and 2.weight
        "3.weight": (4, 16),
        "*.bias": (3, 16),  # 0.bias, 1.bias and 2.bias
        "3.bias": (4,),
    }
    assert {re.sub(r"^\d+", "*", name) for name in metadata["optimizer"]} == {
        f"*.{kind}/{moment}" for kind in ("weight", "bias") for moment in ("exp_avg", "exp_avg_sq")
    }


def test_orbax_alone_loads_every_array_by_what_the_manifest_says(run: Run) -> None:
    """As docs/restoring.md says it: metadata, then load with abstract arrays on any devices."""
    for found in by_orbax(run.step.parent, 1):
        for name, parameter in run.model.named_parameters():
            live = torchax_backend.buffer(parameter)
            assert len(live.sharding.device_set) == 8
            assert found[f"model/{name}"].tobytes() == np.asarray(live).tobytes()
            state = run.optimizer.state[parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                expected = np.asarray(torchax_backend.buffer(state[moment]))
                assert found[f"optimizer/{name}/{moment}"].tobytes() == expected.tobytes()
            assert found[f"optimizer/{name}/step"] == 1.0


@pytest.mark.slow
def test_the_manifest_explains_every_stored_array(run: Run) -> None:
    manifest = read_manifest(run.step)
    stored = arrays_of(ocp.checkpointables_metadata(run.step).metadata["state"])
    leaves = {leaf["array"]: leaf for leaf in array_nodes(manifest["document"])}
    stacks = manifest["stacks"]
    stacked = [member for members in stacks.values() for member in members]
    assert bool(stacked) == (run.options.layout != "flat")
    assert stored.keys() == {*stacks, *(leaves.keys() - set(stacked))}
    for name, array in stored.items():
        members = stacks.get(name, [name])
        leading = [len(members)] if name in stacks else []
        for member in members:
            assert list(array.shape) == leading + leaves[member]["shape"]
            assert array.dtype == np.dtype(leaves[member]["dtype"])


def test_the_manifest_is_strict_json_that_names_what_wrote_it(run: Run) -> None:
    manifest = read_manifest(run.step)
    assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest
    assert manifest["format"] == "torchax_ckpt"
    assert manifest["versions"].keys() >= {"torchax_ckpt", "torch", "torchax", "jax"}


ALONE = """
    import pathlib, sys
    import jax, numpy as np, tensorstore as ts
    from orbax import checkpoint as v0
    from orbax.checkpoint import v1 as ocp

    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    def abstract(leaf):
        leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
        is_wide = leaf.dtype.itemsize // (2 if leaf.dtype.kind == "c" else 1) == 8
        return np.zeros(leaf.shape, leaf.dtype) if is_wide else leaf
    for codec in sys.argv[2:]:
        step = pathlib.Path(sys.argv[1], codec, "1")
        found = ocp.metadata(step, checkpointable_name="state").metadata
        wanted = jax.tree.map(abstract, found)
        by_v1 = ocp.load(step, wanted, checkpointable_name="state")["state"]
        v0_wanted = jax.tree.map(v0.checkpoint_utils.construct_restore_args, wanted)
        by_v0 = v0.PyTreeCheckpointer().restore(
            step / "state", args=v0.args.PyTreeRestore(wanted, restore_args=v0_wanted))["state"]
        for name, leaf in sorted(found["state"].items()):
            kvstore = {"driver": "ocdbt", "base": f"file://{step}/state/", "path": f"state.{name}/"}
            store = ts.open({"driver": "zarr", "kvstore": kvstore}).result()
            by_tensorstore = store.read().result()
            read = [np.asarray(x) for x in (by_v0[name], by_v1[name], by_tensorstore)]
            assert len({(x.dtype, x.shape) for x in read}) == 1, [x.dtype for x in read]
            print(f"{codec} {name}", *(x.tobytes().hex() for x in read))
    assert "torchax_ckpt" not in sys.modules
"""


def test_orbax_and_tensorstore_alone_read_every_dtype_and_codec(tmp_path: Path) -> None:
    """In a process that never imports this package, by both APIs of Orbax."""
    state: dict[str, Any] = {}
    for dtype in NUMPY_DTYPES:
        values = random_bits(dtype, (16, 5), 1)
        state[f"host {dtype}"] = values
        if dtype in JAX_DTYPES:
            rows = NamedSharding(fsdp_mesh(), P("fsdp"))
            state[f"device {dtype}"] = jax.device_put(values, rows)
    state = dict(sorted(state.items()))
    codecs: dict[str, bool | Codec] = {"none": False, **{codec: codec for codec in get_args(Codec)}}
    for name, codec in codecs.items():
        options = CheckpointOptions(compression=codec, layout="flat")
        save_states(tmp_path / name, {1: state}, options=options)
        assert_trees_identical(TorchaxCheckpointer(tmp_path / name).load(1, state), state)
    octets = {name: np.asarray(leaf).tobytes().hex() for name, leaf in state.items()}
    expected = {f"{codec} {name}": read for codec in codecs for name, read in octets.items()}
    found = {}
    for line in run_python(ALONE, str(tmp_path), *codecs, fresh=True).stdout.splitlines():
        name, *read = line.rsplit(" ", 3)
        assert len(set(read)) == 1, name
        found[name] = read[0]
    assert found == expected


def test_names_with_odd_characters_are_escaped_and_explained(directory: Path) -> None:
    keys = ["a/b", "a%2Fb", "*", "|", "#", "é ü", ".", ""]
    state = {key: np.array([i, i]) for i, key in enumerate(keys)}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state)
    stored = ocp.checkpointables_metadata(directory / "1").metadata["state"]["state"]
    assert sorted(stored) == sorted(["a%2Fb", "a%252Fb", "%2A", "|", "#", "é ü", ".", "%"])
    pairs = read_manifest(directory / "1")["document"]["state"]["dict"]
    assert [key for key, _ in pairs] == keys
    assert sorted(leaf["array"] for _, leaf in pairs) == sorted(f"state/{n}" for n in stored)


# --- a step of bare Orbax, seen through this package -------------------------------------------

STEP = 5


def foreign_tree() -> dict[str, Any]:
    """What a recipe without this package saves; names sorted, as JAX sorts them."""
    rows = NamedSharding(fsdp_mesh(), P("fsdp"))
    return {
        "epoch": 3,
        "host": np.array([2**40, -1]),
        "moments": [jnp.ones(2), 5.5],
        "weights": {
            "0.bias": jnp.asarray(random_bits("bfloat16", (3,), 1)),
            "0.weight": jax.device_put(random_bits("float32", (8, 2), 2), rows),
        },
    }


def write_v1_checkpointer(directory: Path, tree: Any) -> None:
    with ocp.training.Checkpointer(directory) as ckpt:
        assert ckpt.save(STEP, tree)


def write_v1_save(directory: Path, tree: Any) -> None:
    ocp.save(directory / str(STEP), tree)


def write_v0_manager(directory: Path, tree: Any) -> None:
    with v0.CheckpointManager(directory) as manager:
        assert manager.save(STEP, args=v0.args.StandardSave(tree))
        manager.wait_until_finished()


def write_v0_named_item(directory: Path, tree: Any) -> None:
    with v0.CheckpointManager(directory) as manager:
        assert manager.save(STEP, args=v0.args.Composite(state=v0.args.StandardSave(tree)))
        manager.wait_until_finished()


WRITERS = (write_v1_checkpointer, write_v1_save, write_v0_manager, write_v0_named_item)


@pytest.fixture(scope="module", params=WRITERS, ids=lambda w: w.__name__.removeprefix("write_"))
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose only step is bare Orbax's; no test changes it."""
    directory = tmp_path_factory.mktemp("foreign")
    request.param(directory, foreign_tree())
    return directory


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, tree)


def test_a_step_of_bare_orbax_is_read_as_host_arrays(foreign: Path) -> None:
    tree, ckpt = foreign_tree(), TorchaxCheckpointer(foreign)
    assert ckpt.all_steps() == [STEP]
    assert ckpt.metrics(STEP) == {}
    assert_trees_identical(ckpt.load(), host(tree))
    assert_trees_identical(ckpt.load(STEP), host(tree))


def test_a_step_of_bare_orbax_is_read_onto_another_layout(foreign: Path) -> None:
    tree = foreign_tree()
    grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    for sharding in (NamedSharding(grid, P()), SingleDeviceSharding(jax.devices()[7]), None):

        def moved(leaf: Any, where: Any = sharding) -> Any:
            is_array = isinstance(leaf, jax.Array)
            return jax.device_put(np.asarray(leaf), where) if is_array else leaf

        def asked(leaf: Any, where: Any = sharding) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        loaded = TorchaxCheckpointer(foreign).load(STEP, jax.tree.map(asked, tree))
        assert_trees_identical(loaded, jax.tree.map(moved, tree))


def test_a_step_of_bare_orbax_is_read_as_torch_tensors(foreign: Path) -> None:
    tree = foreign_tree()
    rows = NamedSharding(fsdp_mesh(2), P("fsdp"))

    def tensors(host: Any, bias: Any, weight: Any) -> dict[str, Any]:
        weight = torchax_backend.wrap(jax.device_put(np.asarray(weight), rows))
        host, bias = (torchax_backend.from_numpy(np.array(array)) for array in (host, bias))
        return {**tree, "host": host, "weights": {"0.bias": bias, "0.weight": weight}}

    arrays = tree["host"], tree["weights"]["0.bias"], tree["weights"]["0.weight"]
    blank = tensors(*(np.zeros(array.shape, array.dtype) for array in arrays))
    assert_trees_identical(TorchaxCheckpointer(foreign).load(STEP, blank), tensors(*arrays))


@pytest.mark.parametrize("write", [write_v1_checkpointer, write_v0_manager])
def test_what_a_step_of_bare_orbax_lacks_is_a_mismatch(directory: Path, write: Any) -> None:
    """Bare Orbax would give zeros, another shape, or cast."""
    write(directory, {"w": np.arange(4.0, dtype=np.float32), "z": np.ones(1)})
    for name, length, dtype in (
        ("absent", 4, np.float32),
        ("w", 5, np.float32),
        ("w", 4, ml_dtypes.bfloat16),
    ):
        where = SingleDeviceSharding(jax.devices()[1])
        on_device = jax.ShapeDtypeStruct((length,), dtype, sharding=where)
        for leaf in (on_device, np.zeros(length, dtype)):
            asked = {"w": np.zeros(4, np.float32), "z": np.zeros(1), name: leaf}
            with pytest.raises(MismatchError, match=name) as caught:
                TorchaxCheckpointer(directory).load(STEP, asked)
            assert caught.value.step == STEP


def test_a_step_of_bare_orbax_is_refused_by_attach(foreign: Path) -> None:
    model = mlp()
    before = {name: bits(p) for name, p in model.named_parameters()}
    with TorchaxCheckpointer(foreign) as ckpt:
        with pytest.raises(ForeignCheckpointError, match="load") as caught:
            ckpt.attach(model)
        assert caught.value.step == STEP
        assert caught.value.path == str(foreign / str(STEP))
        ckpt.attach(model, resume=False)
        for step in (None, STEP):
            with pytest.raises(ForeignCheckpointError, match="load"):
                ckpt.restore(step)
    assert {name: bits(p) for name, p in model.named_parameters()} == before


def test_what_this_package_has_no_form_for_is_said_by_name(directory: Path) -> None:
    tree = {"a": np.ones(2), "b": np.ones(2)}
    ocp.save_checkpointables(directory / "1", {"params": tree, "opt": tree})
    with pytest.raises(ForeignCheckpointError, match=r"found \['opt', 'params'\]"):  # not damaged
        TorchaxCheckpointer(directory).load(1)
    write_v0_named_item(directory, tree)
    kind = {"value_type": "my.Type"}
    metadata = directory / str(STEP) / "state" / "_METADATA"
    edit_json(metadata, lambda d: d["tree_metadata"]["('b',)"]["value_metadata"].update(kind))
    with pytest.raises(CorruptCheckpointError, match=r"b: is of the type 'my\.Type'"):
        TorchaxCheckpointer(directory).load(STEP)
