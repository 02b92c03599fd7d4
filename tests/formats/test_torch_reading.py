"""Files of torch.save's: imported and warm-started from, and never unpickled."""

from __future__ import annotations

import collections
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import run, run_json
from support.models import live, plain, values
from support.torch_files import Evil
from support.training import before_enabling

from torchax_ckpt import TorchaxCheckpointer, torchax_backend, warm_start
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats import torch_reading
from torchax_ckpt.formats.torch_reading import open_torch_file

_WAYS = {
    "state_dict": lambda model, more: model.state_dict(),
    "parameters": lambda model, more: dict(model.named_parameters()) | dict(model.named_buffers()),
    "model": lambda model, more: {**more, "model": model.state_dict()},
    "Lightning's": lambda model, more: {**more, "state_dict": model.state_dict()},
    "elsewhere": lambda model, more: {**more, "app": [3], "trained": {"ema": model.state_dict()}},
}


class Special(torch.Tensor):
    pass


def save(value: Any, path: Path, **how: Any) -> Path:
    with torchax_backend.native_torch():
        torch.save(value, path, **how)
    return path


@pytest.mark.parametrize("way", _WAYS)
def test_attach_goes_on_from_what_torch_has_saved(
    way: str, directory: Path, tmp_path: Path
) -> None:
    model = plain()
    with before_enabling():
        optimizer = torch.optim.AdamW(model.parameters())
        torch.stack([p.sum() for p in model.parameters()]).sum().backward()
        optimizer.step()
        more = {"epoch": 3, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        expected = values(model.state_dict())
    path = save(_WAYS[way](model, more), tmp_path / "weights.pt")
    at = ["--at", "trained/ema"] if way == "elsewhere" else []
    result = run_json("import", path, directory, *at)
    # named_parameters() gives a tied weight once.
    ties = {} if way == "parameters" else {"head.weight": "embed.weight"}
    assert (result["step"], result["ties"]) == (0, ties)
    if way == "parameters":
        return
    again = live()
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(again) == 0
    assert values(again.state_dict()) == expected
    assert again.head.weight is again.embed.weight

    warm = live()
    warm_start(warm, path, at=at[-1] if at else None)
    assert values(warm.state_dict()) == expected


def test_views_come_as_they_are_seen(tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        tensors = {
            "whole": whole,
            "transposed": whole.t(),
            "column": whole[:, 2],
            "block": whole[1:3, 2:5],
            "repeated": whole[0, :1].expand(5),
            "same": whole.view(4, 6),
            "none": whole[:0],
            "scalar": whole[3, 3],
        }
        expected = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    files = open_torch_file(save(tensors, tmp_path / "views.pt"))
    assert files.ties == {"same": "whole"}
    assert files.tensors.keys() == expected.keys() - {"same"}
    for name, tensor in files.tensors.items():
        assert np.array_equal(tensor.mapped(), expected[name]), name
        inner = tuple(slice(n // 3, n) for n in tensor.shape)
        assert np.array_equal(tensor.read(inner), expected[name][inner]), name


_DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e4m3fn float8_e5m2"
)


@pytest.mark.parametrize("dtype", _DTYPES.split())
def test_every_dtype_is_read(dtype: str, tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(2, size=(16 * 6,), dtype=np.uint8)
    with torchax_backend.native_torch():
        size = getattr(torch, dtype).itemsize
        tensor = torch.from_numpy(content[: 6 * size].copy()).view(getattr(torch, dtype))
    (found,) = open_torch_file(save({"w": tensor}, tmp_path / "w.pt")).tensors.values()
    assert (found.dtype, found.shape) == (dtype, (6,))
    assert found.mapped().tobytes() == content[: 6 * size].tobytes()


def test_the_form_is_told_by_the_name_or_the_content(directory: Path, tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        tensors = {"w": torch.ones(3)}
    unnamed = save(tensors, tmp_path / "checkpoint-7")
    assert run_json("import", unnamed, directory)["num_tensors"] == 1
    old = save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    said = run("import", old, tmp_path / "b", code=exit_codes.USAGE)
    assert "old.pth: expected a zip archive, as torch.save has written since torch 1.6" in said
    assert not (tmp_path / "b").exists()


def test_what_is_no_weight_is_left_out_and_no_tensor_is(tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        named = torch.ones(2)
        named.note = "an attribute of its own"  # type: ignore[attr-defined]
        history = collections.defaultdict(list, loss=[1.0])
        state = {"w": named, "b": torch.nn.Buffer(torch.zeros(3)), "history": history}
        state["queue"] = collections.deque([1, 2])
        state["count"] = collections.Counter("abc")
        path = save(state, tmp_path / "w.pt")
        special = save({"w": torch.ones(2).as_subclass(Special)}, tmp_path / "special.pt")
    assert open_torch_file(path).tensors.keys() == {"w", "b"}
    with pytest.raises(
        UnsupportedLeafError, match="w: expected a plain tensor, found .* of the kind .*Special"
    ):
        open_torch_file(special)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorruptCheckpointError, match="the zip archive is cut off"):
        open_torch_file(path)


def test_wrong_use_is_told(directory: Path, tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        path = save({"model": {"w": torch.ones(3)}, "epoch": 2}, tmp_path / "w.pt")
        numbers = save([1, 2], tmp_path / "numbers.pt")
        nested = save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "nested.pt")
        sparse = save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    said = run("import", path, directory, "--at", "ema", code=exit_codes.USAGE)
    assert "expected tensors at 'ema', found 'model', 'epoch'" in said
    run("import", path, directory, "--at", "epoch", code=exit_codes.USAGE)
    with pytest.raises(MismatchError, match="expected tensors in a dict that torch.save wrote"):
        open_torch_file(numbers)
    with pytest.raises(UnsupportedLeafError, match=r"two tensors would be called 'a\.b'"):
        open_torch_file(nested)
    with pytest.raises(UnsupportedLeafError, match="w: .* of the kind sparse_tensor"):
        open_torch_file(sparse)
    assert not directory.exists()


def test_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torchax_backend.native_torch():
        path = save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "w.pt")
    assert open_torch_file(path).tensors.keys() == {"w"}
    with zipfile.ZipFile(tmp_path / "all.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    with pytest.raises(MismatchError):
        open_torch_file(tmp_path / "all.pt")
    assert "run by" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "nested",
    [
        # d = {}; then d = {"a": d, "b": d}, forty times over; each of them in a dict
        b"}(X\x01\x00\x00\x00c}q\x00" + b"".join(
            b"X\x01\x00\x00\x00d}(X\x01\x00\x00\x00ah%cX\x01\x00\x00\x00bh%cuq%c" % (n, n, n + 1)
            for n in range(40)) + b"u",
        # a dict that is in itself
        b"}q\x00(X\x01\x00\x00\x00ah\x00u",
        # a thousand dicts in each other
        b"}X\x01\x00\x00\x00a" * 1000 + b"}" + b"s" * 1000,
    ],
    ids=["shared", "in itself", "deep"],
)  # fmt: skip
def test_dicts_that_never_end_are_damage(nested: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + nested + b".")
    with pytest.raises(
        CorruptCheckpointError, match="a dict that is in two places, or more than 64"
    ):
        open_torch_file(tmp_path / "w.pt")


def test_no_more_is_read_than_a_file_describes_itself_in(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(torch_reading._MAX_DESCRIPTION_BYTES + 1))
    with pytest.raises(
        CorruptCheckpointError, match="expected an uncompressed file of at most 33554432 bytes"
    ):
        open_torch_file(path)


@pytest.mark.parametrize(
    "described",
    [
        {"begin": 1},
        {"size": (3, 3)},
        {"strides": (4, 1)},
        {"strides": (-3, 1)},
        {"strides": (3,)},
        {"begin": -1},
        {"begin": 1 << 62},
        {"size": (1 << 62, 1 << 62), "strides": (1, 1)},
        {"key": "../../etc/passwd"},
    ],
    ids=str,
)
def test_a_tensor_beyond_its_storage_is_damage(described: dict[str, Any], tmp_path: Path) -> None:
    tensor: dict[str, Any] = {
        "begin": 0,
        "size": (2, 3),
        "strides": (3, 1),
        "key": "0",
        **described,
    }

    class Tensor:
        def __reduce__(self) -> Any:
            described = tensor["begin"], tensor["size"], tensor["strides"]
            return torch._utils._rebuild_tensor_v2, (Storage(), *described, False, {})

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Storage):
                return "storage", torch.FloatStorage, tensor["key"], "cpu", 6
            return None

    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Pickler(file, protocol=2).dump({"w": Tensor()})
        archive.writestr("archive/data/0", bytes(24))
    with pytest.raises(CorruptCheckpointError):
        open_torch_file(tmp_path / "w.pt").tensors["w"].mapped()


def test_files_are_damaged_at_every_byte(tmp_path: Path) -> None:
    """Whatever is changed, a tensor comes out or an error of ours does."""
    with torchax_backend.native_torch():
        path = save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "w.pt")
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(600):
        at = int(random.integers(len(content)))
        damaged = content[:at] + bytes([random.integers(256)]) + content[at + 1 :]
        path.write_bytes(damaged[: int(random.integers(1, len(content) * 4))])
        try:
            for tensor in open_torch_file(path).tensors.values():
                tensor.mapped()
        except CheckpointError:
            refused += 1
    assert refused > 100
