"""The work list of `gpu.kernels.attention.prefill`: a step's prompt chunks cut into blocks, on the device.

A block is a tile of a chunk's queries, of all heads of a KV head's group. Where a step has fewer blocks than
the device holds programs, their keys are cut too, and each part has a program of its own:

    keys of a chunk behind a prefix     | part 0 | part 1 | part 2 | part 3 |
    its four blocks of queries          |   0    |   1    |   2    |   3    |    entries of the list
                                        |   4    |   5    |   6    |   7    |
                                        |  ...                              |

All parts are as long as they must be for all to fit: the least number of tiles of which all chunks together
make no more entries than there are programs. Chunks of fewer tiles stay whole. A block's parts divide its
tiles evenly, and by what a layer's window leaves of them (`read_entry`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options, load_record, pow2

FIELDS: tl.constexpr = tl.constexpr(8)
"""int32 per entry of the work list: one sector."""


class Chunks(NamedTuple):
    """A step's prompt chunks.

    slots       integer [C]      slot of each chunk
    starts      integer [C]      position of its first token
    firsts      integer [C + 1]  row of its first token; entry i + 1 is where chunk i ends
    num_chunks  int32 [1] on the device; entries from there on are not read
    """

    slots: Tensor
    starts: Tensor
    firsts: Tensor
    num_chunks: Tensor


class PrefillConfig(NamedTuple):
    """How chunks are cut: queries (tokens times heads of a group) and keys per tile. With `ahead` a tile's
    scores are issued before those of the tile before are used.

    programs  entries per KV head that blocks of fewer are cut into; 0: keys stay whole
    least     tiles of keys in a part: fewer take no longer than what begins and ends a program
    """

    queries: int
    tile: int
    warps: int
    stages: int
    ahead: bool = True
    programs: int = 0
    least: int = 3


def prefill_config(
    head_dim: int, dtype: torch.dtype, kv_heads: int = 1, processors: int = 0
) -> PrefillConfig:
    """Sizes by reasoning and by what the compiler makes of them; float32 is for correctness alone. A
    multiprocessor holds one program. Without `processors` keys stay whole.

    128 queries are a tile for two warpgroups; L2 then delivers K and V at 4 TB/s where 64 queries would ask
    8 of it. 64 keys leave registers for the scores of two tiles. With five stages K is waited for two tiles
    after its load was issued, with three at once (148 KiB of 227). Above head_dim 128 the accumulators leave
    no registers for a second tile's scores.

    TFLOP/s on an H200 with 8 and 4 KV heads for 32 heads of 128, the fastest of eight cuts but for the last
    two steps; in parentheses 64 queries, 64 keys, 4 warps, 3 stages, not ahead, whose blocks are shorter.
    What a step's chunks are like is not known when its graph is made, so one cut serves all.
    1 x 8,192            414  412  (380  391)
    4 x 2,048 at 2,048   398  394  (350  368)
    2 x 4,096            382  381  (361  379)
    8 x 1,024            273  273  (280  301)
    2 x 1,024            261  271  (285  295)
    """
    programs = processors // kv_heads
    if dtype == torch.float32:
        tile = 32 if head_dim <= 128 else 16
        return PrefillConfig(tile, tile, 4, 2, False, programs)
    if head_dim <= 128:
        return PrefillConfig(128, 64, 8, 5, True, programs)
    return PrefillConfig(128, 64, 8, 3, False, programs)


def latent_prefill_config(parts: int, processors: int, itemsize: int = 2) -> PrefillConfig:
    """Sizes for `parts` of query heads over latents (MLA): results of 64 queries, 512 columns each, are 128
    registers a thread of eight warps, and two tiles of 32 keys are under way. In four bytes, which are for
    correctness alone, blocks are a quarter."""
    queries, tile = (64, 32) if itemsize <= 2 else (16, 16)
    return PrefillConfig(queries, tile, 8, 2, False, processors // parts)


def max_blocks(tokens: int, max_chunks: int, group: int, config: PrefillConfig) -> int:
    """Blocks that so many tokens in so many chunks can make: each chunk ends in a part of one."""
    return cdiv(tokens * group, config.queries) + max_chunks - 1


@jit_loose("room", "entries", "programs")
def _plan(
    chunks: Chunks,
    items: tl.tensor,
    room: int,
    entries: int,
    programs: int,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    p = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    c = tl.arange(0, BLOCK)
    begin(PDL)
    n = tl.minimum(tl.load(chunks.num_chunks).to(tl.int32), room)
    live = c < n
    row = tl.load(chunks.firsts + c, mask=live, other=0).to(tl.int32)
    tokens = tl.load(chunks.firsts + c + 1, mask=live, other=0).to(tl.int32) - row
    start = tl.load(chunks.starts + c, mask=live, other=0).to(tl.int32)
    count = (tokens * GROUP + QUERIES - 1) // QUERIES
    tiles = (start + tokens + TILE - 1) // TILE
    blocks = tl.sum(count, 0)
    high = tl.max(tiles, 0)
    each = tl.where(blocks < programs, tl.minimum(LEAST, high), high)
    while each < high:
        middle = (each + high) // 2
        fits = tl.sum(count * ((tiles + middle - 1) // middle), 0) <= programs
        each = tl.where(fits, each, middle + 1)
        high = tl.where(fits, middle, high)
    parts = (tiles + each - 1) // tl.maximum(each, 1)
    pieces = count * parts
    upto = tl.cumsum(pieces, 0)
    total = tl.sum(pieces, 0)
    # Part p in the chunks' own order belongs to chunk `own`, the first that ends behind it.
    own = tl.sum((upto[None, :] <= p[:, None]).to(tl.int32), 1)
    mine = own[:, None] == c[None, :]
    before = tl.sum(tl.where(mine, (upto - pieces)[None, :], 0), 1)
    own_count = tl.sum(tl.where(mine, count[None, :], 0), 1)
    own_parts = tl.sum(tl.where(mine, parts[None, :], 0), 1)
    own_tokens = tl.sum(tl.where(mine, tokens[None, :], 0), 1)
    own_start = tl.sum(tl.where(mine, start[None, :], 0), 1)
    own_row = tl.sum(tl.where(mine, row[None, :], 0), 1)
    block = (p - before) // tl.maximum(own_parts, 1)
    part = p - before - block * own_parts
    keys = own_start + tl.minimum(((block + 1) * QUERIES - 1) // GROUP + 1, own_tokens)
    # Its place: blocks of other chunks with more keys (of earlier chunks: as many), later ones of its own.
    # Block b of chunk c has more than x of its chunk's keys from b = ceil((x * GROUP + 1) / QUERIES) - 1 on.
    x = keys[:, None] - start[None, :] - (c[None, :] < own[:, None]).to(tl.int32)
    least = (tl.maximum(x, 0) * GROUP + QUERIES) // QUERIES - 1
    ahead = tl.where(tokens[None, :] > x, count[None, :] - least, 0)
    ahead = tl.where(mine, (own_count - 1 - block)[:, None], ahead)
    known = p < total
    # With parts all programs run at once, and none has to be first.
    at = items + tl.where(known & (total == blocks), tl.sum(ahead, 1), p) * FIELDS
    there = p < entries
    tl.store(at, tl.load(chunks.slots + own, mask=known, other=0).to(tl.int32), mask=there)
    tl.store(at + 1, own_row, mask=there)
    tl.store(at + 2, own_start, mask=there)
    tl.store(at + 3, tl.where(known, own_tokens, 0), mask=there)
    tl.store(at + 4, block * QUERIES, mask=there)
    tl.store(at + 5, own, mask=there)
    tl.store(at + 6, part, mask=there)
    tl.store(at + 7, own_parts, mask=there)


def plan_prefill(
    chunks: Chunks, tokens: int, group: int, config: PrefillConfig, *, pdl: bool = False
) -> Tensor:
    """A step's work list: its blocks, those with the most keys first, or their parts. The graph has `tokens`
    rows: no chunks together have more; `group` is query heads per KV head.

    Returns int32 [entries, 8]: slot, row of the chunk's first token, its position, tokens of the chunk, the
    block's first query within the chunk, counted in heads of a group, the chunk, part, and how many the block
    has; they stand side by side. Tokens are 0 behind the list's end.
    """
    room = len(chunks.slots)
    entries = max(max_blocks(tokens, room, group, config), config.programs)
    items = torch.empty(entries, FIELDS.value, dtype=torch.int32, device=chunks.slots.device)
    span = min(max(2048 // pow2(room), 1), 64)  # times chunks: what a program holds in registers
    _plan[(cdiv(entries, span),)](
        chunks,
        items,
        room,
        entries,
        config.programs,
        GROUP=group,
        QUERIES=config.queries,
        TILE=config.tile,
        LEAST=config.least,
        BLOCK=pow2(room),
        SPAN=span,
        **launch_options(pdl, 4),
    )
    return items


@jit
def read_entry(
    item: tl.tensor, GROUP: tl.constexpr, WINDOW: tl.constexpr, CONFIG: tl.constexpr, CACHE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """An entry of the list that was made by `PrefillConfig` CONFIG, loaded with the cache modifier CACHE: row
    of the chunk's first token, its position, tokens of the chunk, the block's first query, part, how many
    parts the block has, the part's first tile of keys, the tile behind its last, and the position behind the
    block's last key.

    A window, or a chunk's first block, may have fewer tiles than the parts were counted for: then there are
    fewer parts, and entries behind them have nothing to do."""
    row = tl.load(item + 1, cache_modifier=CACHE).to(tl.int64)
    start, tokens, at = load_record(item + 2, 3, CACHE)
    part, parts = load_record(item + 6, 2, CACHE)
    end = start + tl.minimum((at + CONFIG.queries - 1) // GROUP + 1, tokens)
    first = at * 0
    if WINDOW > 0:
        first = tl.maximum(start + at // GROUP + 1 - WINDOW, 0) // CONFIG.tile
    tiles = (end + CONFIG.tile - 1) // CONFIG.tile - first
    parts = tl.maximum(tl.minimum(parts, tiles // CONFIG.least), 1)
    low, high = first + tiles * part // parts, first + tiles * (part + 1) // parts
    return row, start, tokens, at, part, parts, low, high, end
