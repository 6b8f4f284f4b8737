"""Dependencies between the tiles of two kernels: the second need not wait for all of the first.

A kernel's last programs end one after the other, and until the very last has ended those of the kernel
behind it sit on the free multiprocessors and wait. Where one of the second reads what a few known ones of
the first wrote, these count themselves on a counter, and it waits for those alone.

    first     begin ... store, signal(counter)
    second    launch_dependents ... wait_for(counter, how many) ... load ... finish

With adapters four kernels follow each other. A GEMM begins beside the `shrink_pairs` in front of it, and
waits for that behind its loop:

    shrink    begin ... store
    gate_up   launch_dependents ... load ... wait, add the delta, store, signal(counter) ... finish
    shrink    launch_dependents ... wait_for(counter, how many) ... load ... store ... finish
    down      launch_dependents ... wait_for(counter, how many) ... load ... wait, add the delta ... finish

On an H200 the routed experts of a layer, E 128, N 768, hidden 2,048, 8 of 128, from logits to sum, took in us

    rows                8      16      32     256   1,024   2,048   4,096
    waiting for all   124.6   186.9   250.7   305.6   352.2   416.1     653
    for its own       119.3   181.2   246.5   299.0   340.1   395.0     640

and at 8,192, the power limit, 1,134 to 1,226 and 1,127 to 1,179. Loaded beside what a program reads first,
the count costs 7 us less at 4,096 rows and 3 at 2,048 than behind them
(bench/results/history/h200-experts-variants-*).

It can wait for no program that waits for its place: under dependent launch programs of the second kernel get
one only when all of the first have begun, and without it when all have ended.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from gpu.kernels.jit import begin, jit, launch_dependents


@jit
def signal(counter: tl.tensor) -> None:
    """Count a program, after its last store."""
    tl.debug_barrier()  # all threads' stores, before one thread increments the counter
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@jit
def arrived(counter: tl.tensor) -> tl.tensor:
    """How many programs of the first kernel have signalled so far. Loaded with what else a program needs
    before it can begin, it costs no time of its own."""
    return tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@jit
def wait_for(counter: tl.tensor, seen: tl.tensor, least: tl.constexpr, TMA: tl.constexpr) -> None:
    """Wait for `least` programs of the first kernel, of which `seen` had signalled. With TMA what they wrote
    is fetched by descriptor, which goes another way than a load: the fence has it see what loads see."""
    while seen < least:
        seen = arrived(counter)
    if TMA:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [least], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def take_tile(
    blocks: tl.tensor,
    total: int,
    block: tl.tensor,
    AFTER: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """First line of a kernel: the expert, the first place and the rows of tile `block` of `total` in the
    table of `Tiles`, its counter, and what that counted. AFTER is how many programs of `gate_up` a tile waits
    for, 0: none. EARLY, as all that wait for some are: what a program reads first is older than the kernel
    in front, so that it begins beside that; it ends with `finish`."""
    if EARLY:
        launch_dependents(PDL)
    else:
        begin(PDL)
    count = tl.load(blocks + 2 * total + block, cache_modifier=".cg")
    expert = tl.load(blocks + block, cache_modifier=".cg")
    first = tl.load(blocks + total + block, cache_modifier=".cg")
    done = blocks + 3 * total + block
    seen = count
    if AFTER > 0:
        seen = arrived(done)
    return expert, first, count, done, seen


@jit
def finish(PDL: tl.constexpr) -> None:
    """Last line of a kernel that began early: it has ended only when the one in front has. The next kernel
    waits for this one alone, and may write over what programs of that one have still to read."""
    if PDL and tl.program_id(0) + 1 == tl.num_programs(0):
        gdc_wait()
