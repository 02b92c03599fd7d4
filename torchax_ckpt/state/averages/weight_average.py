"""``WeightAverage``, an average of a model's parameters that is updated while the model trains."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Sharding, SingleDeviceSharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import AttachError, CallError
from torchax_ckpt.layout import names
from torchax_ckpt.snapshot.device_programs import (
    MAX_ARGUMENTS,
    device_program,
    run_by_sharding,
    zeros_program,
)
from torchax_ckpt.snapshot.move_shards import move
from torchax_ckpt.state.modules.module_tensors import Slot, registered, same_objects, slots
from torchax_ckpt.state.training_state import as_rule, require_module

# Averages of narrower parameters are kept in float32: in bfloat16, a small share of a small change
# would be rounded away.
_WIDE = {"bfloat16": jnp.float32, "float16": jnp.float32}
# One program updates at most this share of the averages' bytes, unless a single array has more:
# while it runs, old and new averages are both in memory.
_SHARE = 16


class WeightAverage:
    """The average of a model's parameters over its training, on the model's devices.

    Create it beside the optimizer, attach it, and update it after each step::

        average = WeightAverage(model, decay=0.999)
        ckpt.attach(model, optimizer, stateful={"average": average})
        for step in ckpt.steps(total):
            ...train...
            average.update()
        with average.applied():
            ...evaluate...

    The average has one array for each parameter that requires gradients, and one for tied
    parameters; buffers and frozen parameters are not averaged. The array has the parameter's shape
    and sharding and the parameter's dtype, or float32 for float16 and bfloat16.

    An update does not donate the old averages, because a checkpointer then would have to copy the
    state for each save. It updates a few arrays at a time instead, so it needs little memory beside
    the averages, unless a save in flight still holds the old ones.

    Args:
      model: a module, or a JittableModule; on ``"jax"`` or on ``"meta"``.
      decay: the weight of the old average in an update, at least 0 and less than 1: the new average
        is ``decay * average + (1 - decay) * parameter``. None for the mean over all updates.
      shardings: as in ``attach``: where a restore puts the averages of a model that is on
        ``"meta"`` or that ``attach`` shards. By default, the present shardings of the parameters.
        Each update moves averages to the shardings of the parameters.

    Attributes:
      decay: as given.
      num_updates: how many updates the average has had. The first one copies the parameters.

    Raises:
      AttachError: ``model`` is no module, or is on the CPU, or has no parameter that requires
        gradients.
      ValueError: ``decay`` is out of range.
    """

    def __init__(
        self, model: torch.nn.Module, decay: float | None = 0.999, *, shardings: Any = None
    ) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay: expected None or a number from 0 to below 1, found {decay!r}")
        require_module(model, ("model",))
        self.decay = decay
        self.num_updates = 0
        self._model = model
        rule = as_rule(shardings)
        self._averages: dict[str, jax.Array] = {}
        # What the model had registered, and what required gradients, when its slots were listed.
        self._registered: list[Any] = []
        self._trains: list[bool] = []
        self._listed: dict[str, Slot] = {}
        for name, slot in self._slots().items():
            if slot.is_on_cpu:
                raise AttachError(
                    f"{name}: expected a parameter on 'jax' or on 'meta', found one on the CPU: "
                    "create the WeightAverage after model.to('jax')",
                    key_path=name,
                )
            shape, dtype = tuple(slot.tensor.shape), _dtype(slot)
            ruled = rule and rule(name, jax.ShapeDtypeStruct(shape, dtype))
            sharding = ruled or _sharding(slot)
            (self._averages[name],) = zeros_program(((shape, dtype),), sharding)()
        self._nbytes = {name: array.nbytes for name, array in self._averages.items()}
        if not self._averages:
            raise AttachError(
                "WeightAverage: expected a model with parameters that require gradients, found none"
            )

    def update(self, parameters: Mapping[str, Any] | None = None) -> None:
        """Takes the present parameters into the average.

        Args:
          parameters: name -> the parameter as a torchax tensor or JAX array, for a program that
            keeps its parameters outside of the model, such as one that donates them. None for those
            in the model.

        Raises:
          ValueError: a parameter is missing, has another shape or is not on the devices; or the
            model has parameters that require gradients and have no average. Nothing was changed.
        """
        if parameters is None:
            values: Mapping[str, Any] = {name: slot.tensor for name, slot in self._slots().items()}
        else:
            values = {name: parameters[name] for name in self._averages if name in parameters}
        newer = {
            name: torchax_backend.buffer(value)
            if torchax_backend.is_device_tensor(value)
            else value
            for name, value in values.items()
        }
        self._require_alike(
            {
                name: array.shape
                if isinstance(array, jax.Array)
                else f"a {type(array).__name__} that is not on the devices"
                for name, array in newer.items()
            }
        )
        count = self.num_updates
        share = 1 / (count + 1) if self.decay is None or not count else 1 - self.decay
        by_sharding: dict[Sharding, list[str]] = collections.defaultdict(list)
        for name, array in newer.items():
            by_sharding[array.sharding].append(name)
        for sharding, members in by_sharding.items():
            for chunk in self._chunks(members):
                old = tuple(_moved(self._averages[name], sharding) for name in chunk)
                new = tuple(newer[name] for name in chunk)
                updated = average_program(sharding)(np.float32(share), old, new)
                self._averages.update(zip(chunk, updated, strict=True))
        self.num_updates += 1

    def copy_to(self, model: torch.nn.Module | None = None) -> None:
        """Copies the averages into the parameters of a model, in place, rounded to their dtypes.

        Args:
          model: a model with the same parameters; None for the model that is averaged.

        Raises:
          CallError: the average had no update yet.
          ValueError: the model has other parameters or other shapes. Nothing was changed.
        """
        live = self._slots(model)
        self._require_updated()
        self._require_alike({name: tuple(slot.tensor.shape) for name, slot in live.items()})
        for name, array in self._rounded(live).items():
            live[name].fill(array)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the averages into the model for a ``with`` block, and the parameters back after it.

        Do not train or save in the block: a save would store the averages as the parameters.

        Raises:
          CallError: the average had no update yet.
          ValueError: the model has other parameters than when the average was created.
        """
        present = [
            (tensor, torchax_backend.buffer(tensor))
            for slot in self._slots().values()
            for tensor in slot.tensors
        ]
        try:
            self.copy_to()
            yield
        finally:
            for tensor, array in present:
                torchax_backend.set_buffer(tensor, array)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of updates, and the averages by the names of their parameters."""
        return {
            # An array, so that the description of the state stays the same from save to save.
            "num_updates": np.int64(self.num_updates),
            "weights": {name: torchax_backend.wrap(a) for name, a in self._averages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state that ``state_dict`` returned, by reference.

        Raises:
          ValueError: it is the state of an average of another model.
        """
        stored = {names.without_compile(name): tensor for name, tensor in state["weights"].items()}
        found = {name: torchax_backend.buffer(tensor) for name, tensor in stored.items()}
        expected = {name: _form(array) for name, array in self._averages.items()}
        forms = {name: _form(array) for name, array in found.items()}
        if differing := _differences(expected, forms):
            raise ValueError(f"the averages are of another model: {differing}")
        self._averages = found
        self.num_updates = int(state["num_updates"])

    def _slots(self, model: torch.nn.Module | None = None) -> dict[str, Slot]:
        """Returns the slots of parameters that have an average or require gradients.

        The slots are by first name. A copy of the model for evaluation may be frozen. The slots of
        the averaged model are listed again only if its tensors or what is trained has changed;
        those of a JittableModule always, because the list would keep alive what a step replaced.
        """
        _, overrides = torchax_backend.unwrap_jittable(self._model)
        if overrides or (model is not None and model is not self._model):
            return self._list_slots(self._model if model is None else model)
        found = registered(self._model)
        with torchax_backend.native_torch():  # torchax would dispatch each of these questions
            trains = [value.requires_grad for value in found if isinstance(value, torch.Tensor)]
        if trains != self._trains or not same_objects(found, self._registered):
            self._listed = self._list_slots(self._model)
            self._registered, self._trains = found, trains
        return self._listed

    def _list_slots(self, model: torch.nn.Module) -> dict[str, Slot]:
        root, _ = torchax_backend.unwrap_jittable(model)
        trained = {names.without_compile(n) for n, p in root.named_parameters() if p.requires_grad}
        return {
            name: slot
            for name, slot in slots(model).items()
            if name in trained or name in self._averages
        }

    def _chunks(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yields the names of the averages that one program updates."""
        most = sum(self._nbytes.values()) // _SHARE
        chunk: list[str] = []
        size = 0
        for name in names:
            nbytes = self._nbytes[name]
            if chunk and (2 * len(chunk) >= MAX_ARGUMENTS or size + nbytes > most):
                yield chunk
                chunk, size = [], 0
            chunk.append(name)
            size += nbytes
        if chunk:
            yield chunk

    def _require_alike(self, found: Mapping[str, tuple[int, ...] | str]) -> None:
        """Raises ValueError unless these are the shapes of the averages, by name.

        Args:
          found: name -> shape, or what stands in the place of an array, for the message.
        """
        expected = {name: array.shape for name, array in self._averages.items()}
        if found == expected:
            return
        differing = _differences(
            *({name: _shape(shape) for name, shape in some.items()} for some in (expected, found))
        )
        raise ValueError(
            f"the parameters are not those that are averaged: {differing}. Give a model with "
            "the same parameters and ties, or create a new WeightAverage"
        )

    def _require_updated(self) -> None:
        if not self.num_updates:
            raise CallError("the WeightAverage had no update yet: call update() after a step")

    def _rounded(self, live: Mapping[str, Slot]) -> dict[str, jax.Array]:
        """Returns the averages as new arrays with the dtypes and shardings of live parameters."""
        moved = {
            name: _moved(array, _sharding(live[name])) for name, array in self._averages.items()
        }
        found: dict[str, jax.Array] = {}
        by_dtype: dict[Any, dict[str, jax.Array]] = collections.defaultdict(dict)
        for name, array in moved.items():
            by_dtype[_live_dtype(live[name])][name] = array
        for dtype, arrays in by_dtype.items():
            found |= run_by_sharding(
                functools.partial(cast_program, dtype),
                arrays,
                lambda program, *some: program(*some),
            )
        return found


@device_program(maxsize=256)
def average_program(sharding: Sharding) -> Any:
    """Returns the program that moves averages by a share of their distance to newer values.

    Its arguments are the share, a tuple of averages and a tuple of newer values with this sharding.
    """

    def checkpoint_average(
        share: jax.Array, averages: tuple[jax.Array, ...], newer: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        def moved(average: jax.Array, new: jax.Array) -> jax.Array:
            part = share.astype(average.real.dtype)
            return average * (1 - part) + new.astype(average.dtype) * part

        return tuple(map(moved, averages, newer))

    return jax.jit(checkpoint_average, out_shardings=sharding)


@device_program(maxsize=256)
def cast_program(dtype: Any, sharding: Sharding) -> Any:
    """Returns the program that copies arrays with this sharding, rounded to a dtype."""

    def checkpoint_cast(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.array(array, dtype, copy=True) for array in arrays)

    return jax.jit(checkpoint_cast, out_shardings=sharding)


def _live_dtype(slot: Slot) -> np.dtype[Any]:
    dtype = torchax_backend.numpy_dtype(slot.tensor.dtype)
    return jax.dtypes.canonicalize_dtype(dtype)


def _dtype(slot: Slot) -> np.dtype[Any]:
    """Returns the dtype of the average of a parameter."""
    dtype = _live_dtype(slot)
    return np.dtype(_WIDE.get(dtype.name, dtype))


def _sharding(slot: Slot) -> Sharding:
    if torchax_backend.is_device_tensor(slot.tensor):
        return torchax_backend.buffer(slot.tensor).sharding
    return SingleDeviceSharding(jax.devices()[0])


def _moved(array: jax.Array, sharding: Sharding) -> jax.Array:
    return array if array.sharding == sharding else move(array, sharding)


def _form(array: jax.Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _shape(found: tuple[int, ...] | str) -> str:
    return found if isinstance(found, str) else f"shape {list(found)}"


def _differences(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Returns what differs, by name, for a message; an empty text if nothing differs."""
    names = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
    return "; ".join(
        f"{n}: expected {expected.get(n, 'none')}, found {found.get(n, 'none')}" for n in names[:10]
    )
