"""How decode attention is cut: by heads, rows, tokens of a row, and the format of pages."""

from __future__ import annotations

from typing import NamedTuple

from gpu.kernels.jit import cdiv, pow2

SOME = 32
"""Maximum rows for which three programs on a multiprocessor are faster than two with more pipeline stages."""

LANES = 64
"""Maximum of queries times heads of a group that share a pass over the keys: wgmma multiplies that many at
once, and the registers of a multiprocessor hold the accumulators of two such programs."""

COARSE_LANES = 32
"""`LANES` for float8 pages: with 64 each thread spills 232 bytes of registers."""

WIDE_LANES = 16
"""`LANES` for heads wider than 128 or elements of 4 bytes. With 32 lanes each thread spills 3 KB."""


LONE_GROUP = 8
"""Smallest group in which each token of a single row is computed as a row of its own; they read the same keys
from the L2 cache. On an H200 4 and 8 tokens of 1,024 keys take 7.7 and 9.2 us so, and 9.7 and 17.1 us in one
pass (in groups of 4: 9.4 and 12.6, and 8.3 and 11.0 in one pass)."""


class DecodeConfig(NamedTuple):
    """How decode attention is cut. `programs` per KV head; `least` tiles per program: below that a
    program is cheaper than the merge of two. `registers` of a thread at most, 0 for the compiler's choice.
    `queries` of a row's tokens share one pass over its keys; with 1 each token is a row of its own. Where
    `newest` is not 0, a program loads its first tile before the kernel that stores a step's keys has ended,
    but for the `newest` keys of a row, the most that a step adds to one; and a kernel of its own merges the
    partial results of a row, which otherwise the last of its programs does."""

    tile: int
    warps: int
    stages: int
    programs: int
    least: int = 1
    registers: int = 0
    queries: int = 1
    newest: int = 0


def decode_config(
    head_dim: int,
    kv_heads: int,
    processors: int,
    rows: int = 256,
    *,
    group: int = 8,
    few: bool = False,
    deep: bool = True,
    coarse: bool = False,
) -> DecodeConfig:
    """Return the config for a graph of `rows` rows. `few`: the rows have few keys of their own, as behind a
    shared prefix; `deep`: a multiprocessor has 228 KiB of shared memory and elements have two bytes;
    `coarse`: pages are float8.

    As many programs as a multiprocessor holds, and no fewer. Where there was room for a third of two, they
    took up to a fifth longer under dependent launch (probably some processors got three and others one:
    they are handed out while the kernel before still has its places). Where two are best, registers leave no
    room for it in groups of 8, in smaller ones the copies of a third tile see to that.

    µs on an H200, 8 and 4 KV heads for 32 heads of 128, dependently behind `_qkv`, without its own; in
    parentheses with two programs at all sizes:
    8 x 1,040        14.5  12.4  (19.6  12.9)   from 5 rows three programs, with fewer copies ahead
    16 x 1,040       23.6  15.4  (28.0  17.3)
    32 x 1,040       40.1  23.8  (40.9  25.1)
    256 x 1,040       262   137   (265   138)
    512 x 96         56.5  32.2  (57.6  33.0)   many or `few`: smaller tiles, of which short rows fill more

    A tile of float8 keys is half as many bytes, so there are twice as many programs; few rows have larger
    tiles instead. µs of float8 pages, in parentheses those of bfloat16 pages in the same run
    (`bench/results/history/h200-decode-fp8-pairs.json`):
    3 x 350           6.4   6.2  ( 6.6   6.9)
    8 x 1,024        11.2   7.9  (13.9   9.9)
    32 x 1,024       24.4  14.0  (41.0  24.0)
    64 x 8,192        268   139  ( 490   249)
    256 x 1,024       144    73  ( 258   134)
    512 x 96         43.4  24.1  (57.2  32.2)
    """
    narrow = head_dim <= 128
    roomy = narrow and deep
    tile = 64 if narrow else 32
    per_head = processors / kv_heads
    if coarse and narrow:
        if rows <= 8:
            return DecodeConfig(128, 4, 4, max(int(2 * per_head), 1))
        return DecodeConfig(64, 2, 5, max(int(4 * per_head), 1))
    if rows <= 4:
        # A row may have all the tokens: a draft model's block has no passes, but as many new keys.
        return DecodeConfig(tile, 4, 2, max(int(2 * per_head), 1), newest=rows * int(not coarse))
    if roomy and rows <= SOME and not few:
        return DecodeConfig(tile, 4, 4, max(int(3 * per_head), 1), registers=168)
    if narrow and (few or rows > 256):
        return DecodeConfig(32, 2, 5, max(int(4 * per_head), 1))
    stages = 7 if roomy and group < 8 else 5
    return DecodeConfig(tile, 4, stages, max(int(2 * per_head), 1))


_Cut = DecodeConfig

VERIFY: dict[int, tuple[tuple[int, DecodeConfig], ...]] = {
    16: ((4, _Cut(64, 4, 2, 2, least=2)), (256, _Cut(64, 4, 5, 2)), (0, _Cut(32, 2, 5, 4))),
    32: ((4, _Cut(64, 4, 2, 2, least=2)), (256, _Cut(64, 4, 5, 2)), (0, _Cut(32, 4, 7, 2))),
    64: ((4, _Cut(64, 4, 5, 2, least=4)), (256, _Cut(64, 4, 4, 2)), (0, _Cut(32, 4, 7, 2))),
}
"""Cuts by lanes, for heads of up to 128 in two bytes, each behind the most rows that it is for; the last one
is for more, and for `few` keys, by reasoning. `programs` here are those of a multiprocessor. The others are
the best of those measured on an H200 at 1, 32, 128 and 256 rows of 1,024 and 4,096 keys
(`bench/results/verify-h200.json`; at 32 rows of 1,024 keys 64 lanes take 36.9 us, in tiles of 32 keys 36.0).

With few rows a config of more lanes cuts a row into fewer pieces, because one program merges all pieces of a
row: a piece of 64 lanes has 32 KB, as much as a tile of 64 keys. The tiles of a piece are under way
together."""


def latent_config(parts: int, processors: int, itemsize: int = 2) -> DecodeConfig:
    """Return the config for `parts` of query heads over latents (MLA). Reasoned, not measured: two programs
    run on a multiprocessor, each with 88 KB of shared memory and 255 registers a thread; one more tile in
    flight would leave room for one program. Elements of four bytes are for tests of correctness."""
    return DecodeConfig(32 if itemsize <= 2 else 16, 4, 3, max(2 * processors // parts, 1))


def verify_config(
    head_dim: int,
    kv_heads: int,
    processors: int,
    tokens: int,
    query: int,
    *,
    group: int = 8,
    few: bool = False,
    deep: bool = True,
    coarse: bool = False,
) -> DecodeConfig:
    """Like `decode_config`, for a graph of so many tokens of rows that have up to `query` each. A longer row
    than a tile of queries is taken for several; where two have no room in one, or a lone row of large groups
    is read faster so, each token is a row of its own."""
    plain = head_dim <= 128 and deep
    queries = min(query, ((COARSE_LANES if coarse else LANES) if plain else WIDE_LANES) // group)
    rows = cdiv(tokens, query)
    if queries < 2 or (rows == 1 and group >= LONE_GROUP):
        return decode_config(
            head_dim, kv_heads, processors, tokens, group=group, few=few, deep=deep, coarse=coarse
        )
    if plain:
        *some, (_, cut) = VERIFY[max(pow2(queries * group), 16)]
        cut = next((each for most, each in some if rows <= most and not few), cut)
    else:
        cut = DecodeConfig(64 if head_dim <= 128 else 32, 4, 2 if rows <= 4 else 5, 2)
    return cut._replace(programs=max(int(cut.programs * processors / kv_heads), 1), queries=queries)
