"""What steps, drafts and prompt chunks cost, measured before a runner serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import torch

from core.clock import monotonic
from core.costs import ChunkCosts, CostTable, StepCosts
from core.plan import Chunk, StepPlan
from core.types import NO_TOKENS
from gpu.state.tables import SlotTables
from gpu.step.launched import LaunchedStep
from gpu.step.shape import Shape
from gpu.step.shapes import mixed_sizes

REPEATS: Final = 3
"""Launches of a size, one behind the other: the first one waits for the host."""
SECONDS: Final = 0.6
"""Sizes that are left by then are not measured: a table's line leads to them."""
EACH: Final = 2.5
"""Time for measuring every size of chunks, as a multiple of `SECONDS`. For an 8B on an H200 it suffices up to
about 2,000 tokens, among which `--itl-target` chooses. Products take whole waves of tiles, by 128 or 256
rows, so the time of a size does not follow from those of its neighbours."""
FAR: Final = 4096
"""Tokens of a prompt before the chunk whose attention is measured."""
SPACING: Final = 1.4
"""The next size that is measured is so many times the last one; those between are on a line."""

Launch = Callable[[StepPlan], LaunchedStep]


def is_late(deadline: float) -> bool:
    """Whether a point of the monotonic clock, in seconds, has passed."""
    return monotonic() > deadline


def measure_costs(
    launch: Launch,
    tables: SlotTables,
    sizes: Sequence[int],
    vocab: int,
    late: Callable[[float], bool] = is_late,
) -> StepCosts:
    """The costs of decode-only steps by tokens and of drafting by rows.

    `launch` is a runner's before any request runs: each of its slots is used, which a new request writes
    anew. `sizes` ascend: those that tokens are padded to (`gpu.step.shapes.decode_sizes`), or all where none
    is. With several ranks each has to call this at once, `late` says the same to all, so that they launch the
    same steps, and the first one's costs are for all. `late` is called before every size: it also waits until
    each rank has read the steps of the one before, whose entries the next steps are written to.

    The rows are true ones with different tokens, since padded ones would use no expert; their drafts are
    wrong. Each has one token before, the same for all: trained models make a text's first tokens alike
    whatever they are, and routers send them to the same few experts, which would make a token more seem
    cheap. So reads of KV are left out: they take as long with drafts as without, since a row's query tokens
    share them. Also left out is what requests may ask for: filters, penalties, masks.
    The host's time does not count as long as it is shorter than the device's. The drafter's cost is that of a
    step that `proposes` beyond one that does not.

    Takes at most 1.5 `SECONDS` and a few of the longest steps. A CPU measures fewer sizes in that time.
    """
    rows, deadline = tables.slots - 1, monotonic() + SECONDS

    def seconds(tokens: int, proposes: bool) -> float:
        return _seconds(launch, tables, vocab, _plan(tokens, rows, proposes))

    held = [size for size in sizes if size <= rows * (1 + tables.most_drafts)]
    verify = dict[int, float]()
    for size in _spaced(held):
        if late(deadline) and len(verify) > 1:
            break
        verify[size] = seconds(size, False)
    known = [size for size in held if size <= max(verify)]
    line = np.interp(known, list(verify), list(verify.values()))
    deadline = monotonic() + SECONDS / 2
    draft = dict[int, float]()
    for size in verify:
        if size <= rows and not (late(deadline) and draft):
            draft[size] = max(seconds(size, True) - verify[size], 0.0)
    tables.drafts.zero_()
    tables.length.zero_()
    return StepCosts(
        CostTable(tuple(known), tuple(line.tolist())), CostTable(tuple(draft), tuple(draft.values()))
    )


def measure_chunks(
    launch: Launch, tables: SlotTables, shape: Shape, late: Callable[[float], bool] = is_late
) -> ChunkCosts:
    """The costs of steps of one prompt chunk by its tokens, and of its attention by queries and keys: what a
    chunk takes longer far behind the beginning of its prompt. `launch` and `late` as `measure_costs` has
    them. Takes at most (1 + `EACH`) `SECONDS` and a few of the longest steps."""
    context = shape.pages * shape.page_size
    spaced = monotonic() + EACH * SECONDS
    deadline = spaced + SECONDS

    def seconds(tokens: int, start: int = 0) -> float:
        def chunk(turn: int) -> StepPlan:
            ids = (np.arange(tokens, dtype=np.int32) * 7919 + turn) % shape.vocab
            return StepPlan(0, NO_TOKENS, (Chunk(1, start, ids, True),))

        return _shortest(launch(chunk(turn)) for turn in range(REPEATS))

    sizes = [size for size in mixed_sizes(shape.tokens) if size <= context] or [min(shape.tokens, context)]
    measured: dict[int, float] = {}
    for size in sizes:
        over = late(deadline)
        if len(measured) > 1:
            if over:
                break
            if late(spaced) and size < SPACING * max(measured) and size != sizes[-1]:
                continue
        measured[size] = seconds(size)
    own = max((size for size in measured if 2 * size <= context), default=0)
    start = min(context - own, FAR)
    late(deadline)
    pair = max(seconds(own, start) - measured[own], 0.0) / (own * start) if own else 0.0
    tables.length.zero_()
    known = [size for size in sizes if size <= max(measured)]
    alone = [max(found - pair * size**2 / 2, 0.0) for size, found in measured.items()]
    line = np.interp(known, list(measured), alone)
    return ChunkCosts(CostTable(tuple(known), tuple(line.tolist())), pair)


def _spaced(sizes: Sequence[int]) -> list[int]:
    """The sizes to measure: a geometric subset of ascending `sizes` with the first and the last."""
    found = list(sizes[:1])
    for size in sizes[1:]:
        if size >= SPACING * found[-1] or size == sizes[-1]:
            found.append(size)
    return found


def _plan(tokens: int, rows: int, proposes: bool) -> StepPlan:
    """A step of `tokens` tokens: as many rows as there may be, and the rest drafts."""
    count = min(tokens, rows)
    longest = -(-tokens // count)
    slots = np.arange(1, count + 1, dtype=np.int32)
    return StepPlan(0, slots, query_length=longest, drafts=tokens - count, proposes=proposes)


def _seconds(launch: Launch, tables: SlotTables, vocab: int, plan: StepPlan) -> float:
    """The device's time for `plan`."""
    launched = []
    for turn in range(REPEATS):
        # Different tokens, for which routers choose different experts. Those of the first launch begin their
        # texts, and as no slot has a page, all are stored where the next ones find the token before theirs.
        ids = torch.arange(tables.drafts.numel(), dtype=torch.int32, device=tables.drafts.device)
        tables.drafts.copy_((ids * 7919 + turn).view_as(tables.drafts) % vocab)
        tables.last_token[1:].copy_(tables.drafts[1:, 0])
        tables.drafts[:, 0] = tables.most_drafts
        tables.max_drafts[1:] = tables.most_drafts
        tables.length[1:].fill_(min(turn, 1))
        launched.append(launch(plan))
    return _shortest(launched)


def _shortest(launched: Iterable[LaunchedStep]) -> float:
    """Seconds of the fastest step without the first, which includes the host's time. All steps are launched
    before the first is waited for."""
    return min([step.wait().seconds for step in list(launched)][1:])
