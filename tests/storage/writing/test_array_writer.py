"""How a step's device arrays pass through the host: once, in batches, and no longer than needed."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from jax.sharding import NamedSharding
from support import PROGRAMS
from support.compare import assert_trees_identical
from support.processes import run_python
from support.stages import at
from support.steps import save, save_due
from support.training import P, fsdp_mesh, save_state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import DonatedBufferError, SaveError
from torchax_ckpt.options import Codec
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.writing import array_writer

ONE = 4 << 10
STATUS = Path("/proc/self/status")


def state_of(count: int = 6) -> dict[str, jax.Array]:
    """Arrays of ONE bytes that are alike in nothing but their size, so that none are stacked."""
    where = NamedSharding(fsdp_mesh(), P("fsdp"))
    shapes = [(8 << i, 128 >> i) for i in range(count)]
    arrays = [jnp.arange(1024, dtype=jnp.float32).reshape(shape) + 1 for shape in shapes]
    return {f"w{i}": jax.device_put(a, where) for i, a in enumerate(arrays)}


def bounded(directory: Path, max_bytes: int | None, **options: Any) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory, options=CheckpointOptions(max_host_bytes=max_bytes, layout="flat", **options)
    )


class Batches:
    """The batches that are written: the names of their arrays, and which of them are durable."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.are_done: list[bool] = []
        self.before: Callable[[], Any] = lambda: None
        self.amid: Callable[[], Any] = lambda: None
        self._begin = array_writer._writing

    @contextlib.contextmanager
    def __call__(self, batch: Any, context: Any) -> Iterator[None]:
        paths = [spec["kvstore"]["path"] for _, spec, _ in batch]
        self.names.append([path.removeprefix("state.").removesuffix("/") for path in paths])
        number = len(self.are_done)
        self.before()
        self.are_done.append(False)
        try:
            with self._begin(batch, context):
                self.amid()
                yield
        finally:
            self.are_done[number] = True


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    monkeypatch.setattr(array_writer, "_writing", found := Batches())
    return found


def layers(kinds: str, step: int = 1) -> dict[str, jax.Array]:
    """Two arrays of 2 MiB of each kind, which are stacked."""
    unit = jnp.arange(1 << 19).reshape(512, -1)
    return {f"{kind}.{i}": unit * i * step * ord(kind) for kind in kinds for i in (1, 2)}


@pytest.mark.parametrize(("max_bytes", "most"), [(1, 1), (3 * ONE - 1, 2), (None, 6)])
def test_a_batch_is_no_larger_than_the_bound_unless_an_array_is(
    max_bytes: int | None, most: int, directory: Path, batches: Batches
) -> None:
    with bounded(directory, max_bytes) as ckpt:
        ckpt.save(1, state=state_of())
    found = [[name for name in batch if name.startswith("w")] for batch in batches.names]
    assert max(map(len, found)) == most
    assert sorted(name for batch in found for name in batch) == [*state_of()]
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state_of()), state_of())


def test_what_was_fetched_is_let_go_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[jax.Array]] = []
    left: list[int] = []
    unshared = array_writer.unshared

    def recorded(array: jax.Array) -> jax.Array:
        left.append(sum(ref() is not None for ref in made))
        own = unshared(array)
        made.append(weakref.ref(own))
        return own

    monkeypatch.setattr(array_writer, "unshared", recorded)
    with bounded(directory, 1) as ckpt:
        ckpt.save(1, state=state_of())
    assert len(left) >= 6
    assert left == [0] * len(left)


@pytest.mark.slow
def test_a_save_takes_as_much_host_memory_as_it_may(tmp_path: Path) -> None:
    largest, peaks = 1112 * 4096 * 4, {}
    # What is freed goes back to the system at once, so that the peak is of what is held.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for max_bytes in (0, 4 * largest, largest):
        arguments = "of_save", str(tmp_path / str(max_bytes)), str(max_bytes)
        told = run_python(PROGRAMS / "memory.py", *arguments, devices=4, env=env, fresh=True).stdout
        peak, nbytes = map(int, told.split())
        peaks[max_bytes] = peak
    assert peaks[0] > nbytes  # that this can fail
    # Arrays that lie the other way round are turned as they are written: once more their size.
    assert peaks[4 * largest] < 2 * 4 * largest + (32 << 20)
    assert peaks[largest] < 2 * largest + (32 << 20)


@pytest.mark.parametrize(
    "case", [("reference", None, [2, 1]), ("transfer", None, [3]), ("transfer", 5 << 20, [1, 1, 1])]
)  # a transfer blocks, so it is one batch if it may
def test_stacks_on_cpus_are_made_in_batches(
    case: Any, directory: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, max_bytes, num_stacks = case
    monkeypatch.setattr(array_writer, "STACK_BYTES", 8 << 20)
    state = layers("abc")
    options = CheckpointOptions(snapshot=mode, max_host_bytes=max_bytes)
    save_state(directory, state, options=options)
    assert [sum("*" in name for name in batch) for batch in batches.names] == num_stacks
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state), state)


@pytest.mark.parametrize(
    ("max_bytes", "in_flight", "num_memories"), [(None, [0, 1, 1, 1], 2), (4 << 20, [0] * 4, 1)]
)
def test_a_batch_is_stacked_while_the_one_before_is_written_but_not_in_its_memory(
    max_bytes: int | None,
    in_flight: list[int],
    num_memories: int,
    directory: Path,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []  # where each stack was made
    found: dict[str, list[int]] = {"made": [], "written": []}  # beside how many
    stack = array_writer.stack

    def held() -> list[int]:
        """Where the stacks lie that are not yet durable; a batch has one, or none at the end."""
        return [at for at, is_done in zip(given, batches.are_done, strict=False) if not is_done]

    def recorded_stack(rows: Any, out: Any) -> Any:
        found["made"].append(len(held()))
        assert out.ctypes.data not in held()
        given.append(out.ctypes.data)
        return stack(rows, out)

    batches.before = lambda: found["written"].append(len(held()))
    monkeypatch.setattr(array_writer, "STACK_BYTES", 4 << 20)
    monkeypatch.setattr(array_writer, "stack", recorded_stack)
    states = {step: layers("abcd", step) for step in (1, 2)}
    options = CheckpointOptions(snapshot="reference", max_host_bytes=max_bytes)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        for step, state in states.items():
            save_due(ckpt, step, of=state)
    assert found["made"] == in_flight * 2
    assert max(found["written"]) == max(in_flight)
    assert len(set(given)) == num_memories  # for all batches of all saves
    for step, saved in states.items():
        assert_trees_identical(TorchaxCheckpointer(directory).load(step, saved), saved)


def test_small_stacks_do_not_lie_in_memory_that_is_used_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore may keep small values where they are, longer than a batch is written."""
    given: list[bool] = []
    stack = array_writer.stack

    def recorded(rows: Any, out: Any) -> Any:
        given.append(out is not None)
        return stack(rows, out)

    monkeypatch.setattr(array_writer, "stack", recorded)
    options = CheckpointOptions(snapshot="reference")
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        for step, size in enumerate((200, 8191, 8192)):
            state = {f"a.{i}": jnp.arange(size) * i for i in (1, 2)}
            save(ckpt, step, of=state)
    assert given == [False, False, True]


def test_a_batch_that_cannot_be_fetched_waits_for_the_one_in_flight(
    directory: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, made = array_writer.stack, list[Any]()

    def failing(rows: Any, out: Any) -> Any:
        made.append(out)
        if len(made) == 3:
            assert batches.are_done == [True, False]
            raise OSError("the host is on fire")
        return stack(rows, out)

    monkeypatch.setattr(array_writer, "STACK_BYTES", 4 << 20)
    state = layers("abcd")
    with TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="reference")) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(array_writer, "stack", failing)
            ckpt.save(1, state=state)
            with pytest.raises(SaveError, match="the host is on fire"):
                ckpt.wait_until_finished()
        assert batches.are_done == [True, True]
        save(ckpt, 2, of=state)
        assert ckpt.all_steps() == [2]


@pytest.mark.parametrize("codec", [None, "zstd", "blosc-lz4", "blosc-zstd"])
def test_metadata_is_what_tensorstore_would_write(codec: Codec | None, tmp_path: Path) -> None:
    dtypes = [*"?bhilBHILefdFD", "bfloat16", "int4", "float8_e4m3fn", "float8_e5m2", ">f4", ">i8"]
    arrays = {
        f"{np.dtype(dtype).name}{number}{len(shape)}": np.zeros(shape, dtype)
        for number, dtype in enumerate(dtypes)
        for shape in ((), (3, 4))
    }
    path = epath.Path(tmp_path)
    array_writer.write_arrays(path, arrays, {}, codec=codec)
    folder, context = path / array_writer.folder_of_process(0), array_writer._context()
    written = ts.KvStore.open(array_writer._kvstore(folder), context=context).result()
    for name, array in arrays.items():
        chunk = array.shape
        compressor = array_writer.zarr_compressor(codec, chunk) if codec else None
        metadata = {"shape": array.shape, "chunks": chunk, "compressor": compressor}
        spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
        made = ts.open({**spec, "dtype": array.dtype.name}, create=True).result()
        assert made.kvstore is not None
        expected = made.kvstore.read(".zarray").result().value
        assert written.read(f"{array_checks.stored_key(name)}/.zarray").result().value == expected


def test_writing_again_and_again_takes_no_more_memory(tmp_path: Path) -> None:
    """TensorStore 0.1.86 never frees what ``Spec.to_json`` returns, 5 KB for each array."""
    arrays, resident_kib = {f"w{i}": np.ones(100) for i in range(20)}, list[int]()
    for number in range(150):
        array_writer.write_arrays(epath.Path(tmp_path / "state"), arrays, {})
        shutil.rmtree(tmp_path / "state")
        if number in (49, 149):
            gc.collect()
            resident_kib.append(int(re.findall(r"VmRSS:\s+(\d+)", STATUS.read_text())[0]))
    assert resident_kib[1] - resident_kib[0] < 5_000  # and not 9,500


def test_donating_between_batches_fails(directory: Path, batches: Batches) -> None:
    state = state_of()

    def donate() -> None:
        if len(batches.names) == 2:
            jax.tree.map(lambda array: array.delete(), state)

    ckpt = bounded(directory, 1, snapshot="reference")
    save_due(ckpt, 1, of=state_of())
    batches.names.clear()
    batches.before = donate
    ckpt.save(2, state=state, force=True)
    with pytest.raises(SaveError, match=r"state/w\d: its buffer was donated") as caught:
        ckpt.wait_until_finished()
    assert isinstance(caught.value.__cause__, DonatedBufferError)
    assert ckpt.all_steps() == [1]
    ckpt.save(3, state=state_of(), force=True)
    ckpt.close()


@pytest.mark.parametrize(("name", "max_bytes"), [("w3", None), ("w3", 1), ("host", 1)])
def test_what_cannot_be_written_fails_the_save_and_nothing_is_written_after(
    name: str, max_bytes: int | None, directory: Path, batches: Batches
) -> None:
    state = {**state_of(), "host": np.arange(3)}

    def burn() -> None:
        if name in batches.names[-1]:
            raise OSError("the disk is on fire")

    batches.amid = burn
    options = CheckpointOptions(max_host_bytes=max_bytes, layout="flat", save_timeout_secs=60)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state)
        with pytest.raises(SaveError, match="the disk is on fire"):
            ckpt.wait_until_finished()
        assert name in batches.names[-1]
        batches.amid = lambda: None
        save(ckpt, 2, of=state)
        assert ckpt.all_steps() == [2]
    assert {path.name for path in directory.iterdir()} == {"2", "events"}


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("state/ocdbt.process_0", r"state/w: expected 1 chunk .* found 0: another"),
        (".", "folder was removed while the step was written"),
    ],
)
def test_a_step_that_lost_a_chunk_or_its_folder_is_not_committed(
    lost: str, said: str, directory: Path
) -> None:
    """TensorStore makes the folder anew, without what was written before."""

    def lose() -> None:
        (draft,) = directory.glob("writing-1-*")
        shutil.rmtree(draft / lost)

    at("write the arrays", lose, when="before" if lost == "." else "after", number=1)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)})
        with pytest.raises(SaveError, match=said):
            ckpt.wait_until_finished()
        ckpt.save(2, state={"w": np.arange(3)}, force=True)
    assert ckpt.all_steps() == [2]
