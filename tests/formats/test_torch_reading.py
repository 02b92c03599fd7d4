"""Files of torch.save's: imported and warm-started from, with no code of theirs run."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import run, run_json
from support.models import live, plain, values
from support.torch_files import Evil, archive, arrays_in, pickled_tensor, save_torch
from support.training import before_enabling, resume

from torchax_ckpt import torchax_backend, warm_start
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats.importing import open_files

_WAYS = {
    "state_dict": lambda model, more: model.state_dict(),
    "parameters": lambda model, more: dict(model.named_parameters()) | dict(model.named_buffers()),
    "model": lambda model, more: {**more, "model": model.state_dict()},
    "Lightning's": lambda model, more: {**more, "state_dict": model.state_dict()},
    "elsewhere": lambda model, more: {**more, "app": [3], "trained": {"ema": model.state_dict()}},
}


class Special(torch.Tensor):
    pass


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
        more |= {"count": collections.Counter("abc"), "raw": b"x", "kind": torch.float32}
        expected = values(model.state_dict())
    path = save_torch(_WAYS[way](model, more), tmp_path / "weights.pt")
    at = ["--at", "trained/ema"] if way == "elsewhere" else []
    result = run_json("import", path, directory, *at)
    # named_parameters() gives a tied weight once.
    ties = {} if way == "parameters" else {"head.weight": "embed.weight"}
    assert (result["step"], result["ties"]) == (0, ties)
    if way == "parameters":
        return
    again = live()
    assert resume(directory, again) == 0
    assert values(again.state_dict()) == expected
    assert again.head.weight is again.embed.weight

    warm = live()
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    warm_start(warm, link, at=at[-1] if at else None)
    assert values(warm.state_dict()) == expected


def test_views_come_as_they_are_seen(tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        tensors = {
            "whole": whole,
            "transposed": whole.t(),
            "column": whole[:, 2],
            "block": whole[1:3, 2:5],
            "narrow": whole.bfloat16().t(),
            "repeated": whole[0, :1].expand(5),
            "same": whole.view(4, 6),
            "none": whole[:0],
            "scalar": whole[3, 3],
        }
        expected = {n: torchax_backend.to_numpy(t.contiguous()) for n, t in tensors.items()}
    files = open_files(save_torch(tensors, tmp_path / "views.pt"))
    assert files.ties == {"same": "whole"}
    assert files.tensors.keys() == expected.keys() - {"same"}
    for name, tensor in files.tensors.items():
        assert tensor.mapped().tobytes() == expected[name].tobytes(), name
        inner = tuple(slice(n // 3, n) for n in tensor.shape)
        assert tensor.read(inner).tobytes() == expected[name][inner].tobytes(), name


def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        whole = torch.ones(1 << 20)
        tensors = {"repeated": whole[:1].expand(1 << 24)}  # 64 MiB; the others 4 MiB each
        tensors |= {str(i): whole[i : i + (1 << 20) - 100] for i in range(51)}
    with pytest.raises(UnsupportedLeafError, match=r"store 4\d{6} bytes of them, so they share"):
        open_files(save_torch(tensors, tmp_path / "large.pt"))
    del tensors["repeated"]
    open_files(save_torch(tensors, tmp_path / "smaller.pt"))


_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def test_every_dtype_is_read(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(2, size=(16 * 6,), dtype=np.uint8)
    tensors, expected = {}, {}
    with torchax_backend.native_torch():
        for dtype in _DTYPES:
            size = 6 * getattr(torch, dtype).itemsize
            tensors[dtype] = torch.from_numpy(content[:size].copy()).view(getattr(torch, dtype))
            expected[dtype] = (dtype, content[:size].tobytes())
    found = arrays_in(save_torch(tensors, tmp_path / "w.pt"))
    assert {n: (a.dtype.name, a.tobytes()) for n, a in found.items()} == expected


def test_the_form_is_told_by_the_name_or_the_content(directory: Path, tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        tensors = {"w": torch.ones(3)}
    unnamed = save_torch(tensors, tmp_path / "checkpoint-7")
    assert run_json("import", unnamed, directory)["num_tensors"] == 1
    old = save_torch(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    said = run("import", old, tmp_path / "b", code=exit_codes.USAGE)
    assert "old.pth: expected a zip archive, as torch.save has written since torch 1.6" in said
    assert not (tmp_path / "b").exists()


def test_tensors_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        plain = torch.ones(2)
        plain.note = "an attribute of its own"  # type: ignore[attr-defined]
        path = save_torch({"w": plain, "b": torch.nn.Buffer(torch.zeros(3))}, tmp_path / "w.pt")
        assert arrays_in(path).keys() == {"w", "b"}
        for name, tensor in {
            "sparse": torch.eye(3).to_sparse(),
            "meta": torch.ones(3, device="meta"),
            "Special": torch.ones(2).as_subclass(Special),
        }.items():
            with pytest.raises(UnsupportedLeafError, match=f"expected .*plain.*, found .*{name}"):
                open_files(save_torch({"w": tensor}, tmp_path / f"{name}.pt"))


def test_wrong_use_is_told(directory: Path, tmp_path: Path) -> None:
    with torchax_backend.native_torch():
        path = save_torch({"model": {"w": torch.ones(3)}, "epoch": 2}, tmp_path / "w.pt")
        numbers = save_torch([1, 2], tmp_path / "numbers.pt")
        nested = save_torch({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "n.pt")
    said = run("import", path, directory, "--at", "ema", code=exit_codes.USAGE)
    assert "expected tensors at 'ema', found 'model', 'epoch'" in said
    run("import", path, directory, "--at", "epoch", code=exit_codes.USAGE)
    with pytest.raises(MismatchError, match="expected tensors in a dict, found no keys"):
        open_files(numbers)
    with pytest.raises(UnsupportedLeafError, match=r"two tensors would be called 'a\.b'"):
        open_files(nested)
    path.write_bytes(path.read_bytes()[:-30])
    said = run("import", path, directory, code=exit_codes.FOUND)
    assert not directory.exists()
    with pytest.raises(CorruptCheckpointError, match=r"w\.pt: .*the zip archive is cut off"):
        open_files(path)


def test_no_code_of_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torchax_backend.native_torch():
        path = save_torch({"w": torch.ones(2), "evil": Evil()}, tmp_path / "w.pt")
    for evil in (path, archive(tmp_path / "all.pt", pickle.dumps(Evil(), 2))):
        with pytest.raises(UnsupportedLeafError, match=r"found objects of builtins\.print"):
            open_files(evil)
    assert "run by" not in capsys.readouterr().out
    # torch takes quadratic time for the message about such a name.
    long = archive(tmp_path / "long.pt", b"\x80\x02c" + b"n" * 10**6 + b"\nm\n.")
    with pytest.raises(UnsupportedLeafError, match=r"found objects of nnn*\. torch"):
        open_files(long)


_NESTED = {
    # d = {}; then d = {"a": d, "b": d}, forty times over; each of them in a dict
    "shared": b"}(X\x01\x00\x00\x00c}q\x00" + b"".join(
        b"X\x01\x00\x00\x00d}(X\x01\x00\x00\x00ah%cX\x01\x00\x00\x00bh%cuq%c" % (n, n, n + 1)
        for n in range(40)) + b"u",
    "in itself": b"}q\x00(X\x01\x00\x00\x00ah\x00u",
    "a thousand deep": b"}X\x01\x00\x00\x00a" * 1000 + b"}" + b"s" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("nested", _NESTED)
def test_dicts_that_never_end_are_damage(nested: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "w.pt", b"\x80\x02" + _NESTED[nested] + b".")
    with pytest.raises(
        CorruptCheckpointError, match="a dict that is in two places, or more than 64"
    ):
        open_files(path)


def test_no_more_is_read_than_a_file_describes_itself_in(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    said = "expected an uncompressed file of at most 33554432 bytes"
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with pytest.raises(CorruptCheckpointError, match=said):
            open_files(archive(path, bytes((32 << 20) + 1), how))
    # The storages alone are compressed, which torch would map as they are.
    with zipfile.ZipFile(archive(path, pickled_tensor()), "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/1", bytes(99))
    with pytest.raises(CorruptCheckpointError, match="data/1.*that is compressed"):
        arrays_in(path)
    size = 1 << 40
    with open(path, "wb") as sparse:
        sparse.write(b"PK\x03\x04")
        sparse.seek(size)
        sparse.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 1 << 26, 0, 0))
    with pytest.raises(CorruptCheckpointError, match="expected an archive that lists its files in"):
        open_files(path)
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "pipe.pt")
    for name in ("pipe.pt", "link.pt"):
        with pytest.raises(CheckpointError):
            open_files(tmp_path / name)


def test_a_tensor_beyond_its_storage_is_damage(tmp_path: Path) -> None:
    path = archive(tmp_path / "w.pt", pickled_tensor())
    assert arrays_in(path)["w"].tolist() == [[0] * 3] * 2
    beyond: list[dict[str, Any]] = [
        {"begin": 1},
        {"size": (3, 3)},
        {"strides": (4, 1)},
        {"strides": (-3, 1)},
        {"strides": (3,)},
        {"begin": -1},
        {"begin": 1 << 62},
        {"size": (1 << 62, 1 << 62), "strides": (1, 1)},
        {"size": (1 << 35,), "strides": (1,), "num_elements": 1 << 40},
        {"num_elements": -6},
        {"key": "../../etc/passwd"},
    ]
    for described in beyond:
        archive(path, pickled_tensor(**described))
        with pytest.raises(CorruptCheckpointError, match=r"w\.pt"):
            arrays_in(path)
