"""Arrays of a save that are not stored in Orbax's database of the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np

from torchax_ckpt.snapshot.host_array import HostArray


class Place(Protocol):
    """Where an array is stored, if not in Orbax's database of this process."""

    async def store(
        self, spec: dict[str, Any], write: Callable[[dict[str, Any], Any], Awaitable[None]]
    ) -> None:
        """Stores the array.

        Args:
          spec: TensorStore's spec with which Orbax would write the array.
          write: writes the array, given a spec and a TensorStore transaction.
        """

    def require_complete(self) -> None:
        """Raises RuntimeError unless all arrays of the place were stored."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedArray(HostArray):
    """A device array that Orbax records in the step's metadata, but that ``place`` stores."""

    place: Place


class PlacedHostArray(np.ndarray):
    """The same for a host array. Orbax treats it as it treats any array of numpy.

    An array that numpy derives from it lacks the attribute ``place``.
    """

    place: Place


def placed_on_host(array: np.ndarray, place: Place) -> PlacedHostArray:
    """Returns a view of a host array that ``place`` stores."""
    view = array.view(PlacedHostArray)
    view.place = place
    return view
