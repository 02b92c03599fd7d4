"""To plain torch and back: optimizers in its files, and torch.distributed.checkpoint both ways."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import PROGRAMS
from support.commands import run, run_json
from support.compare import bits
from support.models import values
from support.processes import run_python
from support.torch_files import Evil, archive, arrays_in, pickled_tensor, save_dcp
from support.training import before_enabling, mlp, save, train_and_save
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from torchax_ckpt import load_torch_state_dict, warm_start
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats import state_dict
from torchax_ckpt.formats.importing import open_files
from torchax_ckpt.storage.arrays import read_arrays

pytest_plugins = ("support.tied_fixtures",)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which the second steps what the model has first."""
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    groups: list[dict[str, Any]] = [
        {"params": second, "lr": 0.25, "betas": (0.8, 0.9)}, {"params": first}
    ]  # fmt: skip
    return torch.optim.AdamW(groups, lr=0.125)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    directory = tmp_path_factory.mktemp("trained") / "run"
    torch.manual_seed(0)
    model = mlp()
    optimizer = optimizer_for(model)
    train_and_save(directory, model, optimizer)
    return directory, model, optimizer


def shown(optimizer: torch.optim.Optimizer) -> list[str]:
    lines = []
    for group in optimizer.param_groups:
        lines.append(f"{group['lr']} {group['betas']}")
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for tensor in (parameter, state["step"], state["exp_avg"], state["exp_avg_sq"]):
                lines.append(bits(tensor)[-1].hex())
    return [*lines, "3.0"]


@pytest.mark.slow
def test_plain_torch_goes_on_with_model_and_optimizer(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _, optimizer = trained
    monkeypatch.setattr(read_arrays, "STREAMED_BYTES", 1)
    paths = [tmp_path / "x.pt", tmp_path / "dcp"]
    for path, form in zip(paths, ("pt", "dcp"), strict=True):
        args = ("--format", form, "--optimizer")
        assert run_json("export", directory, 2, path, *args)["num_tensors"] == 4 + 4 * 3
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    expected = shown(optimizer)
    result = run_python(PROGRAMS / "plain_torch.py", *map(str, paths), fresh=True)
    assert result.stdout.splitlines() == expected + expected


def test_what_is_larger_than_the_bound_lies_in_a_file(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _, _ = trained
    mapped: list[int] = []
    memmap = np.memmap

    def counted(*args: Any, **kwargs: Any) -> Any:
        mapped.append(kwargs["shape"][0])
        return memmap(*args, **kwargs)

    monkeypatch.setattr(state_dict.np, "memmap", counted)
    out = tmp_path / "small.pt"
    total = run_json("export", directory, 2, out, "--format", "pt", "--optimizer")["num_bytes"]
    assert mapped == []
    for bound in (total, total - 1):
        out = tmp_path / f"{bound}.pt"
        monkeypatch.setattr(read_arrays, "STREAMED_BYTES", bound)
        run("export", directory, 2, out, "--format", "pt", "--optimizer")
    assert len(mapped) == 1
    assert total <= mapped[0] <= total + 64 * 16
    with before_enabling():
        a, b = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (total, total - 1))
        assert values(a["model"]) == values(b["model"])

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_dict.os, "posix_fallocate", full)
    monkeypatch.setattr(read_arrays, "STREAMED_BYTES", 1)
    out = tmp_path / "none"
    said = run("export", directory, 2, out, "--format", "dcp", code=exit_codes.UNAVAILABLE)
    assert "has no room for" in said
    assert not out.exists()


def test_several_optimizers_are_exported_by_name(directory: Path, tmp_path: Path) -> None:
    models = {"g": mlp(), "d": mlp()}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in models.items()}
    optimizers["g"].add_param_group({"params": [], "lr": 0.5})
    save(directory, models, optimizers)
    out = tmp_path / "x.pt"
    run("export", directory, 1, out, "--format", "pt", "--optimizer", "--at", "model/g")
    with before_enabling():
        loaded = torch.load(out, weights_only=True)
        assert loaded["optimizer"].keys() == {"g", "d"}
        first, second = loaded["optimizer"]["g"]["param_groups"]
        assert (first["params"], second["params"], second["lr"]) == ([0, 1, 2, 3], [], 0.5)


def test_wrong_use_is_told(trained: Any, directory: Path, tmp_path: Path) -> None:
    path, model, _ = trained
    save(directory, model, step=2)
    for source, args, message in (
        (directory, ("x.pt", "--format", "pt", "--optimizer"), "found none"),
        (path, ("x.safetensors", "--optimizer"), "--at optimizer"),
        (path, ("x.pt", "--format", "dcp"), "the name of a directory"),
        (path, ("x", "--format", "dcp", "--max-shard-size", "1GB"), "needs the format safetensors"),
    ):
        out, *rest = args
        said = run("export", source, 2, tmp_path / out, *rest, code=exit_codes.USAGE)
        assert message in said
        assert not (tmp_path / out).exists()


def test_what_was_exported_as_dcp_is_imported_again(
    tied: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, expected = tied
    run("export", directory, 3, tmp_path / "dcp", "--format", "dcp")
    result = run_json("import", tmp_path / "dcp", tmp_path / "again")
    assert result["files"] == [str(tmp_path / "dcp" / ".metadata")]
    assert values(load_torch_state_dict(tmp_path / "again")) == expected
    run("export", directory, 3, tmp_path / "safetensors")
    for source, words in (
        (directory, "found a directory without them"),
        (tmp_path / "safetensors", "was written neither by torch.save nor by torch's DCP"),
    ):
        said = run("import", source, tmp_path / "x", "--at", "model", code=exit_codes.USAGE)
        assert words in said
    said = run("import", tmp_path / "dcp", tmp_path / "x", "--at", "ema", code=exit_codes.USAGE)
    assert "expected tensors at 'ema', found 'model'" in said


@pytest.mark.slow
def test_tensors_come_together_from_the_chunks_of_many_ranks(tmp_path: Path) -> None:
    run_python(
        PROGRAMS / "ranks_saving_dcp.py", str(tmp_path / "dcp"), str(tmp_path / "store"), fresh=True
    )
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    whole = np.arange(35, dtype=np.float32).reshape(7, 5)
    expected = {
        "rows": whole, "columns": whole + 100, "same": whole + 200, "turned": (whole + 300).T,
        "number": np.array(7, np.float32),
    }  # fmt: skip
    files = open_files(tmp_path / "dcp")
    assert len(files.tensors["rows"].parts) == len(files.tensors["columns"].parts) == 2
    model = nn.Module()
    for name, array in expected.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(array.shape, device="jax")))
    warm_start(model, tmp_path / "dcp")
    for name, array in expected.items():
        assert bits(getattr(model, name))[1:] == bits(array)[1:], name
    part = files.tensors["columns"].read((slice(2, 6), slice(1, 4)))
    assert part.tobytes() == expected["columns"][2:6, 1:4].tobytes()


def test_every_dtype_is_read(tmp_path: Path) -> None:
    kinds = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 uint8 bool uint16"
    with before_enabling():
        numbers = torch.arange(12).reshape(3, 4).float()
        tensors = {kind: numbers.to(getattr(torch, kind)) for kind in kinds.split()}
        expected = {kind: bits(tensor)[1:] for kind, tensor in tensors.items()}
        tensors["none"] = numbers[:0]
    save_dcp(tensors, tmp_path / "dcp", num_files=1)
    found = arrays_in(tmp_path / "dcp")
    assert found.pop("none").shape == (0, 4)
    assert {kind: bits(array)[1:] for kind, array in found.items()} == expected


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_dcp(
        {"model": {"w": torch.arange(6.0).reshape(2, 3)}}, tmp_path / "dcp", num_files=1
    )


def test_no_code_of_a_checkpoint_is_run(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = saved.glob("*.distcp")
    archive(file, pickle.dumps(Evil(), 2))
    rewrite(saved, lambda m: setattr(stored(m), "length", file.stat().st_size))
    with pytest.raises(UnsupportedLeafError, match=r"found objects of builtins\.print"):
        arrays_in(saved)
    (saved / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CorruptCheckpointError, match=r"DCP writes .*found builtins\.print"):
        open_files(saved)
    assert "run by" not in capsys.readouterr().out


def metadata(folder: Path) -> Any:
    """torch's own reading, to be changed and written again."""
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, change: Any) -> None:
    found = metadata(folder)
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def stored(found: Any) -> Any:
    return next(iter(found.storage_data.values()))


def of_tensor(**values: Any) -> Any:
    """A change of what metadata says of the tensor."""
    return lambda m: vars(m.state_dict_metadata["model.w"]).update(values)


@pytest.mark.parametrize(
    "change",
    [
        *(
            lambda m, path=path: setattr(stored(m), "relative_path", path)
            for path in ("../x", "/etc/passwd", 5, "..", "")
        ),
        lambda m: setattr(stored(m), "offset", -1),
        lambda m: setattr(stored(m), "length", None),
        lambda m: m.storage_data.clear(),
        lambda m: setattr(m, "storage_data", None),
        lambda m: setattr(m, "state_dict_metadata", {"w": 3}),
        *(
            of_tensor(size=torch.Size(size))
            for size in ((2, 4), (2, 2), (0, *(2**40,) * 64), (2**63, 0))
        ),
        of_tensor(size="large"),
        lambda m: m.state_dict_metadata["model.w"].chunks.append(5),
        *(
            lambda m, data=data: setattr(m, "planner_data", data)
            for data in ({"model.w": 5}, {"model.w": ()}, {"model.w": ("m", None)}, {5: ("m", "w")})
        ),
    ],
)
def test_metadata_that_torch_does_not_write_is_damage(change: Any, saved: Path) -> None:
    rewrite(saved, change)
    with pytest.raises(CorruptCheckpointError):
        open_files(saved)


# 60 lists or tuples, each of the one before, twice: to show or hash the last takes 2 ** 60 steps.
LISTS = b"](]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(60)) + b"e"
TUPLES = b")q\x00" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))


def fields(name: bytes, module: bytes = b"metadata", **values: bytes) -> bytes:
    """Pickled: an object of this class of DCP, with these fields."""
    items = b"".join(b"\x8c%c%b%b" % (len(k), k.encode(), v) for k, v in values.items())
    return b"ctorch.distributed.checkpoint.%b\n%b\n)R}(%bub" % (module, name, items)


def of_storage(fqn: bytes = b"\x8c\x01w", relative_path: bytes = b"\x8c\x01f") -> bytes:
    """Pickled: metadata of one chunk."""
    index = fields(b"MetadataIndex", fqn=fqn, offset=b")")
    values = {"relative_path": relative_path, "offset": b"K\x00", "length": b"K\x01"}
    place = fields(b"_StorageInfo", b"filesystem", **values)
    return fields(b"Metadata", storage_data=b"}(" + index + place + b"u", state_dict_metadata=b"}")


def of_dtype(dtype: bytes) -> bytes:
    """Pickled: metadata of a tensor of no elements."""
    properties = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)R" + dtype + b"\x85b"
    tensor = fields(b"TensorStorageMetadata", size=b")", properties=properties, chunks=b"]")
    described = b"}(\x8c\x01w" + tensor + b"u"
    return fields(b"Metadata", storage_data=b"}", state_dict_metadata=described)


def of_places(data: bytes) -> bytes:
    return fields(b"Metadata", planner_data=data)


# Where in metadata something stands -> the metadata with it there.
PLACES = {
    "place": lambda x: of_places(b"}(\x8c\x01w" + x + b"\x85u"),
    "key of a place": lambda x: of_places(b"}(" + x + b"\x8c\x01w\x85u"),
    "key of one place": lambda x: of_places(b"}" + x + b"\x8c\x01w\x85s"),
    "key of a text dict": lambda x: of_places(b"(" + x + b"\x8c\x01wd"),
    "member of a set": lambda x: of_places(b"\x8f(" + x + b"\x90"),
    "member of a frozen set": lambda x: of_places(b"(" + x + b"\x91"),
    "fqn": lambda x: of_storage(fqn=x),
    "file": lambda x: of_storage(relative_path=x),
    "key of a tensor": lambda x: fields(
        b"Metadata",
        storage_data=b"}",
        state_dict_metadata=b"}(" + x + fields(b"TensorStorageMetadata") + b"u",
    ),
    "field": lambda x: b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R}(" + x + b"Nub",
    "dtype": of_dtype,
    "size": lambda x: b"ctorch\nSize\n" + x + b"\x85R",
    "ordered": lambda x: b"ccollections\nOrderedDict\n](" + x + b"N\x86e\x85R",
}


@pytest.mark.parametrize("place", PLACES)
def test_parts_in_common_are_not_multiplied(place: str, saved: Path) -> None:
    for shared in (LISTS, TUPLES):
        (saved / ".metadata").write_bytes(b"\x80\x04" + PLACES[place](shared) + b".")
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata: expected a file of torch"):
            open_files(saved)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x8c\x04name\x8c\x04name\x93\x94" + b"h\x00h\x00\x93q\x00" * 30,  # names of itself
        b"]q\x00h\x00\x93",  # of a list
        b"c" + b"n" * 1001 + b"\nm\n",
        b"ctorch\nsave\n)R",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x04name)s\x86b",
        b"ctorch\nSize\nN}\x8c\x0c__defaults__)s\x86b",
        b"Nr\xff\xff\xff\xff",  # would take memory for 2 ** 32 values
        b"\x8d\xff\xff\xff\xff\x00\x00\x00\x00",
    ],
)
def test_no_name_in_metadata_does_anything(pickled: bytes, saved: Path) -> None:
    (saved / ".metadata").write_bytes(b"\x80\x04" + pickled + b".")
    with pytest.raises(CorruptCheckpointError, match="expected a file of torch") as caught:
        open_files(saved)
    assert len(str(caught.value)) < 500


def cut(folder: Path, shape: tuple[int, ...], *chunks: tuple[Any, Any]) -> None:
    """Says of the tensor that it has this shape, and these starts and sizes of chunks."""

    def change(found: Any) -> None:
        described, place = found.state_dict_metadata["model.w"], stored(found)
        described.size = torch.Size(shape)
        described.chunks = [
            ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)) for start, sizes in chunks
        ]
        found.storage_data = {
            MetadataIndex("model.w", torch.Size(start)): place for start, _ in chunks
        }

    rewrite(folder, change)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((6,), [((0,), (3,)), ((2,), (3,))]),
        ((2, 3), [((0, 0), (1, 3)), ((0, 1), (1, 2)), ((1, 0), (1, 1))]),
        ((4, 4), [((0, 0), (4, 2)), ((2, 0), (2, 4))]),
        ((4, 4), [((0, 0), (2, 4)), ((1, 1), (2, 3)), ((3, 0), (1, 2))]),
    ],
)
def test_chunks_that_overlap_are_damage(shape: Any, chunks: Any, saved: Path) -> None:
    """Their sizes may well add up: what they leave out would be whatever was in memory."""
    cut(saved, shape, *chunks)
    with pytest.raises(CorruptCheckpointError, match=r"model\.w: expected chunks that"):
        open_files(saved)


def test_chunks_of_any_mesh_are_apart(saved: Path) -> None:
    random = np.random.default_rng(0)
    for shape in ((5,), (7, 6), (4, 5, 6)):
        edges = [[0, *sorted(random.choice(range(1, n), 2, replace=False)), n] for n in shape]
        boxes = list(itertools.product(*(itertools.pairwise(edge) for edge in edges)))
        random.shuffle(boxes)
        chunks = [([int(a) for a, _ in box], [int(b - a) for a, b in box]) for box in boxes]
        cut(saved, shape, *chunks)
        assert len(open_files(saved).tensors["w"].parts) == 3 ** len(shape)


def test_only_regular_files_of_the_directory_are_opened(saved: Path, tmp_path: Path) -> None:
    (file,) = saved.glob("*.distcp")
    tensor = open_files(saved).tensors["w"]
    for path, read in ((file, tensor.mapped), (saved / ".metadata", lambda: open_files(saved))):
        elsewhere = path.rename(tmp_path / "elsewhere")
        path.symlink_to(elsewhere)
        with pytest.raises(CorruptCheckpointError, match="found a symbolic link"):
            read()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match="found a folder or special file|no such file"):
            read()
        path.unlink()
        elsewhere.rename(path)
        read()


def test_no_more_is_read_than_metadata_has(saved: Path) -> None:
    os.truncate(saved / ".metadata", (256 << 20) + 1)  # sparse
    with pytest.raises(CorruptCheckpointError, match="expected at most 268435456 bytes"):
        open_files(saved)


def test_a_chunk_that_repeats_its_elements_is_damage(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    pickled = pickled_tensor(strides=(0, 0), is_alone=True)
    archive(file, pickled, zipfile.ZIP_STORED, **{"0": bytes(4)})
    rewrite(saved, lambda m: setattr(stored(m), "length", file.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match="too small for the tensor"):
        arrays_in(saved)


def test_archives_that_do_not_hold_the_tensor_are_refused(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    described = (saved / ".metadata").read_bytes()
    for change in (
        lambda m: setattr(stored(m), "offset", 7),
        lambda m: setattr(stored(m), "offset", 10**9),
        lambda m: setattr(stored(m), "length", 100),
        lambda m: setattr(stored(m), "relative_path", "gone"),
        lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.float64),
    ):
        rewrite(saved, change)
        tensor = open_files(saved).tensors["w"]
        with pytest.raises((CorruptCheckpointError, DirectoryError)):
            tensor.mapped()
        (saved / ".metadata").write_bytes(described)
    archive(file, pickled_tensor(is_alone=True))
    rewrite(saved, lambda m: setattr(stored(m), "length", file.stat().st_size))
    assert arrays_in(saved)["w"].tolist() == [[0] * 3] * 2
    archive(file, pickled_tensor(begin=1, is_alone=True))  # beyond its storage
    rewrite(saved, lambda m: setattr(stored(m), "length", file.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match="expected"):
        arrays_in(saved)


def test_compressed_chunks_are_refused_by_name(saved: Path) -> None:
    rewrite(saved, lambda m: setattr(stored(m), "transform_descriptors", ["zstd"]))
    with pytest.raises(UnsupportedLeafError, match=r"model\.w: is compressed"):
        open_files(saved)
    shutil.rmtree(saved)
    with pytest.raises(DirectoryError):
        open_files(saved)
