"""The index of served text (`gpu.state.served`) on a CPU, in numpy over the memory of its tensors.

On a GPU it is a part of `gpu.kernels.ngram`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.types import NO_TOKENS, Ints, NDArray64
from gpu.state.history import CELLS, FRESH, NAMESPACE, NO_TOKEN, History
from gpu.state.served import BLOCK, FACTORS, SIZES, TAIL, Served


class Match(NamedTuple):
    """Where a row's newest tokens were served: `size` of them, 0 for nowhere, and what followed."""

    size: int
    tokens: Ints


NOWHERE = Match(0, NO_TOKENS)


def hashes(namespaces: NDArray64, windows: Ints) -> NDArray[np.uint32]:
    """Hashes of tokens int32 [n, size], the newest first, in namespaces int64 [n]."""
    halves = namespaces.view(np.uint32).reshape(-1, 2)
    found = halves[:, 0].copy()
    for token in windows.T.astype(np.uint32):
        found ^= token
        found *= np.uint32(FACTORS[0])
    found ^= found >> np.uint32(15)
    found ^= halves[:, 1]
    found *= np.uint32(FACTORS[1])
    found ^= found >> np.uint32(15)
    return found


def serve(history: History, served: Served, slots: Ints, firsts: Ints, taken: list[Ints]) -> None:
    """Append what each slot accepted, the tokens `taken` from position `firsts` on, to the index. The
    tokens before them are in the slots' texts."""
    words, width = history.words.numpy(), history.width
    tokens, owners, places = (each.numpy() for each in served)
    windows, ends, names = [], [], []
    for slot, first, accepted in zip(slots, firsts, taken, strict=True):
        state = words[slot, width:]
        namespace = state[NAMESPACE : NAMESPACE + 2].copy().view(np.int64)
        if not namespace or not len(accepted):
            continue
        begin, text = int(state[CELLS]), accepted
        if state[FRESH]:
            begin = -(-begin // BLOCK) * BLOCK
            text = np.append(words[slot, np.arange(max(first - TAIL, 0), first) % width], accepted)
        stop = begin + len(text)
        cells = np.arange(begin, -(-stop // BLOCK) * BLOCK) % served.width
        tokens[slot, cells] = NO_TOKEN
        tokens[slot, cells[: len(text)]] = text
        owners[slot, cells // BLOCK] = namespace
        before = np.arange(stop - len(accepted), stop) - 1
        windows.append(tokens[slot, (before[:, None] - np.arange(TAIL)) % served.width])
        ends.append(slot * served.width + before % served.width)
        names.append(namespace.repeat(len(before)))
        state[CELLS], state[FRESH] = stop % served.width, 0
    if windows:
        known, found, cells = (np.concatenate(each) for each in (names, windows, ends))
        for row, size in zip(places, SIZES, strict=True):
            row[hashes(known, found[:, :size]) & (len(row) - 1)] = cells


def find(history: History, served: Served, slots: Ints, lasts: Ints) -> list[Match]:
    """The best place of each slot's newest tokens, up to position `lasts`."""
    words, width, most = history.words.numpy(), history.width, history.most
    tokens, owners, places = (each.numpy() for each in served)
    back = np.arange(TAIL)
    newest = words[slots[:, None], (lasts[:, None] - back) % width]
    names = words[slots, width + NAMESPACE : width + NAMESPACE + 2].copy().view(np.int64)[:, 0]
    found = [NOWHERE for _ in slots]
    for row, size in zip(places[::-1], SIZES[::-1], strict=True):
        owner, cell = np.divmod(row[hashes(names, newest[:, :size]) & (len(row) - 1)], served.width)
        cells = (cell[:, None] + np.arange(1 - size, 1 + most)) % served.width
        there = tokens[owner[:, None], cells]
        good: NDArray[Any] = owners[owner[:, None], cells // BLOCK] == names[:, None]
        good[:, :size] &= there[:, :size] == newest[:, size - 1 :: -1]
        good[:, size:] &= there[:, size:] >= 0
        good[(names == 0) | (lasts + 1 < size)] = False
        lengths = np.where(good.all(1), good.shape[1], good.argmin(1)) - size
        for at in np.flatnonzero(lengths > 0):
            found[at] = Match(size, there[at, size : size + lengths[at]])
    return found
