"""Exchange between ranks: equal bits on all, in any order of arrival, and an end when one is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from core.errors import EngineFailed
from gpu.ranks import Rank, make_ranks
from tests.rigs.wait import PATIENCE

T = TypeVar("T")


def on_each(count: int, work: Callable[[Rank], T]) -> list[T]:
    """The answers of `work` on so many ranks, each a thread."""
    _, ranks = make_ranks(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, rank) for rank in ranks]
        return [future.result(PATIENCE) for future in futures]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_have_equal_bits_on_all_ranks(count: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(count)]
    first, *others = on_each(count, lambda rank: rank.reduce_sum(parts[rank.shard.rank]))
    assert all(torch.equal(first, other) for other in others) and first.dtype == dtype
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    assert torch.equal(first, total.to(dtype))


def test_parts_are_gathered_in_the_order_of_ranks() -> None:
    for found in on_each(3, lambda rank: rank.gather(torch.full((2, 2), float(rank.shard.rank)))):
        assert found.tolist() == [[0, 0, 1, 1, 2, 2]] * 2


def test_a_rank_that_is_ahead_changes_nothing_that_others_read() -> None:
    def work(rank: Rank) -> list[Tensor]:
        return [rank.reduce_sum(torch.tensor([float(turn * (1 + rank.shard.rank))])) for turn in range(300)]

    for found in on_each(4, work):
        assert [float(each) for each in found] == [turn * 10.0 for turn in range(300)]


def test_rank_0_decides() -> None:
    assert on_each(3, lambda rank: rank.first(lambda: rank.shard.rank + 5, int)) == [5, 5, 5]


def test_where_rank_0_raises_so_do_all() -> None:
    def work(rank: Rank) -> str:
        try:
            rank.first(lambda: {}["nothing"], int)
        except (KeyError, RuntimeError) as error:
            return type(error).__name__
        return "none"

    assert on_each(3, work) == ["KeyError", "RuntimeError", "RuntimeError"]


def test_an_abort_ends_waits_under_way_and_to_come() -> None:
    group, (first, second, _) = make_ranks(3)
    begun, found = threading.Semaphore(0), list[str]()

    def wait(rank: Rank) -> None:
        begun.release()
        try:
            rank.reduce_sum(torch.zeros(1))
        except EngineFailed as error:
            found.append(str(error))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (first, second)]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=PATIENCE)
    group.abort("it raised")
    group.abort("later")
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    wait(first)
    assert found == ["another rank has ended: it raised"] * 3
