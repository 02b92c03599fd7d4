"""Writes what makes a folder with arrays a step that Orbax reads, but for the commit mark.

    STEP/state/                            the arrays (``array_writer.py``)
    STEP/state/_METADATA                   the tree of the arrays
    STEP/state/_sharding                   how the arrays were sharded
    STEP/state/array_metadatas/process_0   how the arrays are cut
    STEP/ITEM/data.json                    an item in JSON
    STEP/_CHECKPOINT_METADATA              the items and the commit time

Orbax could write these files itself. Its saves count operations with one counter for the process,
and wait for other processes at barriers that name nobody, so that two tiers, a save of one process
or a save of the program's own would disturb each other.

Source: Orbax 0.12.8, ``metadata/tree.py``, ``metadata/sharding.py``,
``metadata/array_metadata_store.py`` and ``metadata/step_metadata_serialization.py``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from torchax_ckpt.layout import names, unchanged
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.arrays import array_checks, chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.assets import Assets
from torchax_ckpt.storage.directory.committed_step import ASSETS, MANIFEST, STATE, SUMMARY
from torchax_ckpt.storage.medium import medium, seals
from torchax_ckpt.storage.writing import array_writer

_TREE = "_METADATA"
_CUTTING = "array_metadatas/process_0"
# The classes of Orbax that read the items.
_PYTREE_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_JSON_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.json_handler.JsonHandler"
# Orbax's number for a key of a dict.
_DICT_KEY = 2


@stage("complete the step")
def complete(
    step: epath.Path,
    arrays: Mapping[str, AnyArray],
    manifest: Manifest,
    summary: Mapping[str, Any],
    *,
    began_nsecs: int,
    at_nsecs: int,
    num_processes: int = 1,
    assets: Assets | None = None,
    texts: seals.Texts | None = None,
) -> None:
    """Writes all of a step but its arrays, which are durable, and the commit mark.

    ``arrays`` are without values, by stored name; times are since 1970; ``texts`` has parts of
    the manifest that an earlier step had too. Raises SaveError if an array is incomplete.
    """
    _merge(step / STATE, arrays, manifest.unchanged, num_processes)
    _write_tree(step, arrays)
    items = {
        MANIFEST: seals.encoded(manifest.to_json(), texts),
        SUMMARY: seals.encoded(dict(summary)),
    }
    if assets is not None:
        items[ASSETS] = assets.content
    for item, content in items.items():
        medium.of(step).make_inner_folder(step / item)
        (step / item / "data.json").write_bytes(content)
    record = {
        "item_handlers": {STATE: _PYTREE_HANDLER, **dict.fromkeys(items, _JSON_HANDLER)},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": began_nsecs,
        "commit_timestamp_nsecs": at_nsecs,
        "custom_metadata": {},
    }
    _write(step / commit_record.RECORD, record)


def _merge(
    folder: epath.Path,
    arrays: Mapping[str, AnyArray],
    databases: Mapping[str, Database],
    num_processes: int,
) -> None:
    """Merges the databases of the processes, and those of frozen arrays, into one."""
    apart = {name for database in databases.values() for name in database.arrays}
    others = [array for name, array in arrays.items() if name not in apart]
    writers = {0} if num_processes == 1 else set().union(*map(chunking.storing_processes, others))
    folders = [array_writer.folder_of_process(index) for index in sorted(writers) if others]
    for name, database in databases.items():
        folders += unchanged.folders_of(name, database.processes)
    array_writer.merge(folder, folders, arrays)


def _write_tree(step: epath.Path, arrays: Mapping[str, AnyArray]) -> None:
    on_devices = {n: a for n, a in arrays.items() if not isinstance(a, np.ndarray)}
    keys = {name: names.component_and_rest(name) for name in arrays}
    tree = {
        "tree_metadata": {str(keys[n]): _entry(keys[n], array) for n, array in arrays.items()},
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    _write(step / STATE / _TREE, tree)
    if not on_devices:
        return
    described: dict[Any, str] = {}  # many arrays have one sharding
    shardings = {}
    for name, array in on_devices.items():
        if (text := described.get(array.sharding)) is None:
            text = described[array.sharding] = json.dumps(_described(array.sharding))
        key = base64.urlsafe_b64encode(array_checks.stored_key(name).encode()).decode()
        shardings[key] = text
    _write(step / commit_record.SHARDINGS, shardings)
    cutting = [
        {
            "array_metadata": {
                "param_name": array_checks.stored_key(name),
                "write_shape": chunking.written_shape(array),
                "chunk_shape": chunking.chunk_shape(array),
                "ext_metadata": None,
            }
        }
        for name, array in on_devices.items()
    ]
    _write(step / STATE / _CUTTING, {"array_metadatas": cutting})


def _write(path: epath.Path, content: Any) -> None:
    medium.of(path).make_inner_folder(path.parent)
    path.write_bytes(json.dumps(content).encode())


def _entry(keys: tuple[str, ...], array: AnyArray) -> dict[str, Any]:
    value: dict[str, Any] = {"value_type": "np.ndarray", "skip_deserialize": False}
    if not isinstance(array, np.ndarray):
        value["value_type"] = "jax.Array"
        value["write_shape"] = chunking.written_shape(array)
    key_metadata = [{"key": key, "key_type": _DICT_KEY} for key in keys]
    return {"key_metadata": key_metadata, "value_metadata": value}


def _described(sharding: jax.sharding.Sharding) -> dict[str, Any]:
    """Returns a sharding as Orbax describes it.

    Orbax describes only these two, and reads one for each array: others are said to be one device.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding):
        device = min(map(str, sharding.device_set))
        return {"sharding_type": "SingleDeviceSharding", "device_str": device}
    mesh = sharding.mesh
    ids = np.array([{"id": device.id} for device in mesh.devices.flat])
    return {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.shape.values()),
        "axis_names": list(mesh.axis_names),
        "axis_types": [str(kind) for kind in mesh.axis_types],
        "partition_spec": tuple(sharding.spec),
        "device_mesh": {"mesh": ids.reshape(mesh.devices.shape).tolist()},
    }
