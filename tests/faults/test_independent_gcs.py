"""A bucket on a second server, independent of the first: lease, commit, listing, restore."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import gcs_proxy
import pytest
import test_gcs
from independent_gcs import IndependentServer

from torchax_ckpt.storage.directory import compare_and_swap

pytest_plugins = ("gcs_fixtures",)


@pytest.fixture(scope="module")
def _independent(_gcs: gcs_proxy.FaultProxy) -> Iterator[None]:
    before, server = _gcs.server, IndependentServer(_gcs.url)
    _gcs.server = server  # type: ignore[assignment]
    yield
    _gcs.server = before
    server.stop()


@pytest.fixture
def gcs(_independent: None, gcs: gcs_proxy.FaultProxy) -> gcs_proxy.FaultProxy:
    """The proxy in front of the other server."""
    return gcs


@pytest.mark.usefixtures("gcs")
def test_of_many_that_replace_a_record_at_once_one_succeeds(bucket_run: str) -> None:
    records = [compare_and_swap.record_at(f"{bucket_run}/lease") for _ in range(8)]
    seen = None
    for turn in range(5):
        won: list[tuple[int, compare_and_swap.Seen]] = []
        begin = threading.Barrier(len(records))

        def swap(i: int, seen: compare_and_swap.Seen | None = seen, turn: int = turn) -> None:
            begin.wait()  # noqa: B023 - each turn ends before the next
            with contextlib.suppress(compare_and_swap.Conflict):
                won.append((i, records[i].swap(seen, f"{turn} of {i}".encode())))  # noqa: B023

        threads = [threading.Thread(target=swap, args=(i,)) for i in range(len(records))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((winner, seen),) = won
        assert records[0].read() == seen
        assert seen.content == f"{turn} of {winner}".encode()


# Imported here once more, it runs with this file's ``gcs``.
test_a_run_on_another_server = pytest.mark.slow(
    test_gcs.test_a_run_is_saved_pruned_resumed_resharded_and_goes_back_twice
)
