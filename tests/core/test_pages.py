"""The free list hands out each page once and never the dump."""

from __future__ import annotations

import numpy as np
import pytest

from core.cache.pages import IntegrityError, PageAllocator


def test_every_usable_page_is_handed_out_once_and_page_0_never() -> None:
    pages = PageAllocator(8)
    taken = pages.try_take(7)
    assert taken is not None
    assert taken.dtype == np.int32
    assert sorted(taken.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert pages.free == 0


def test_too_many_is_none_and_takes_nothing() -> None:
    pages = PageAllocator(8)
    assert pages.try_take(5) is not None
    assert pages.try_take(3) is None
    assert pages.free == 2
    pages.check()


def test_zero_pages_is_an_empty_array_even_from_an_empty_pool() -> None:
    pages = PageAllocator(2)
    assert pages.try_take(1) is not None
    nothing = pages.try_take(0)
    assert nothing is not None
    assert len(nothing) == 0


def test_what_was_taken_does_not_change_when_pages_come_and_go() -> None:
    pages = PageAllocator(8)
    first = pages.try_take(3)
    assert first is not None
    before = first.tolist()
    pages.release(first)
    pages.try_take(2)
    pages.release([7])
    assert first.tolist() == before


def test_pages_come_back_from_lists_and_arrays() -> None:
    pages = PageAllocator(8)
    taken = pages.try_take(7)
    assert taken is not None
    pages.release(taken[:3])
    pages.release(taken[3:].tolist())
    pages.check()
    assert sorted(pages.snapshot().tolist()) == [1, 2, 3, 4, 5, 6, 7]


def test_more_back_than_were_out_is_refused() -> None:
    pages = PageAllocator(8)
    pages.try_take(2)
    with pytest.raises(IntegrityError, match="only 2 were out"):
        pages.release([1, 2, 3])
    assert pages.free == 5


def test_check_names_the_page_that_came_back_twice() -> None:
    pages = PageAllocator(8)
    pages.try_take(4)
    pages.release([2, 3])
    pages.check()
    pages.release([3])
    with pytest.raises(IntegrityError, match=r"\[3\]"):
        pages.check()


@pytest.mark.parametrize("page", [0, 8, -1])
def test_check_names_pages_that_are_not_usable(page: int) -> None:
    pages = PageAllocator(8)
    pages.try_take(1)
    pages.release([page])
    with pytest.raises(IntegrityError, match="usable are 1 to 7"):
        pages.check()


def test_a_pool_of_the_dump_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="page 0 is the dump"):
        PageAllocator(1)
