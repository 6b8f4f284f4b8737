"""Free pages of the KV pool. Knows page numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.types import Ints


class IntegrityError(RuntimeError):
    """The cache's accounting is inconsistent: a bug here or in a caller, never a client's fault."""


class PageAllocator:
    """A stack of free page ids; the page freed last is taken first.

    Owner: event loop. Page 0 is the dump and is never handed out: usable ids are
    1 ... num_pages - 1. A page given back twice is found by `check`, not by `release`: a test per
    page would cost more than the rest of a release.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages has none to give: page 0 is the dump")
        self.total = num_pages - 1
        self._stack: Ints = np.arange(self.total, 0, -1, dtype=np.int32)
        self._count = self.total

    @property
    def free(self) -> int:
        """Pages on the stack."""
        return self._count

    def try_take(self, n: int) -> Ints | None:
        """`n` page ids, int32 [n], or None (and nothing taken) when fewer are free."""
        if n > self._count:
            return None
        end, self._count = self._count, self._count - n
        return self._stack[self._count : end][::-1].copy()

    def release(self, pages: Ints | Sequence[int]) -> None:
        """Take pages back. Raises `IntegrityError` when that is more than were ever out."""
        end = self._count + len(pages)
        if end > self.total:
            raise IntegrityError(f"{len(pages)} pages given back, only {self.total - self._count} were out")
        self._stack[self._count : end] = pages
        self._count = end

    def snapshot(self) -> Ints:
        """The free page ids, a copy, in no promised order."""
        return self._stack[: self._count].copy()

    def check(self) -> None:
        """Raise `IntegrityError` unless the free ids are in range and each is there once."""
        free = self.snapshot()
        wrong = free[(free < 1) | (free > self.total)]
        if wrong.size:
            raise IntegrityError(f"free list has pages {wrong.tolist()}; usable are 1 to {self.total}")
        ids, counts = np.unique(free, return_counts=True)
        if (counts > 1).any():
            raise IntegrityError(f"pages {ids[counts > 1].tolist()} were given back twice")
