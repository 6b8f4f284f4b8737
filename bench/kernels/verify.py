"""Attention of rows with drafts: each token a row of its own against one pass for all tokens of a row.

`python -m bench.kernels.verify --out DIR [--seconds 60]`: the figures behind `decode.VERIFY`, in
DIR/verify.json. Every cut is checked before it is timed: against the plain kernel, which takes each token as
a row, and that one's first tokens against plain torch. `bound` is the time of reading each row's keys and
values once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from bench.kernels import inputs, reference
from bench.kernels.compile import compiling
from bench.kernels.inputs import Heads, Pages, error
from bench.kernels.timing import BANDWIDTH, microseconds
from bench.kernels.tune import compile_all
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig, decode_config, verify_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages as Layer

DEVICE = torch.device("cuda")
PAGE = 16
PROCESSORS = 132
SHAPES = {"8b": Heads(32, 8, 128), "30b": Heads(32, 4, 128)}
"""Attention of Qwen3-8B and of Qwen3-30B-A3B."""

_Cut = DecodeConfig

FEW = [
    *(_Cut(64, 4, 2, 2, least=least) for least in (1, 2)),
    *(_Cut(64, 4, 5, 2, least=least) for least in (2, 4)),
    *(_Cut(64, 4, 7, 2, least=least) for least in (3, 6)),
    _Cut(32, 4, 7, 2, least=4),
]
"""Configs to try for one row."""

CUTS = {
    16: [_Cut(64, 4, 5, 2), _Cut(64, 4, 7, 2), _Cut(64, 4, 4, 3, registers=168), _Cut(32, 2, 5, 4)],
    32: [_Cut(64, 4, 5, 2), _Cut(64, 4, 7, 2), _Cut(32, 4, 7, 2), _Cut(64, 8, 5, 1)],
    64: [_Cut(32, 4, 5, 2), _Cut(32, 4, 7, 2), _Cut(64, 4, 4, 2), _Cut(64, 4, 5, 1), _Cut(64, 8, 5, 1)],
}
"""Configs to try for more rows, by lanes; `programs` are those of a multiprocessor."""


class Case(NamedTuple):
    """A number of rows, and the tokens and keys of each."""

    shape: str
    rows: int
    tokens: int
    keys: int

    @property
    def lanes(self) -> int:
        """Lanes of the case's tile of queries."""
        heads = SHAPES[self.shape]
        return heads.q // heads.kv * self.tokens

    def plain(self, tokens: int) -> DecodeConfig:
        """The config for `tokens` tokens that are a row each."""
        heads = SHAPES[self.shape]
        return decode_config(heads.dim, heads.kv, PROCESSORS, tokens, group=heads.q // heads.kv)

    def cuts(self) -> dict[str, DecodeConfig]:
        """Configs by name: the one that serving takes, and others to try."""
        heads = SHAPES[self.shape]
        taken = verify_config(
            heads.dim, heads.kv, PROCESSORS, self.rows * self.tokens, self.tokens, group=heads.q // heads.kv
        )
        found = {"taken": taken}
        for cut in FEW if self.rows == 1 else CUTS[self.lanes]:
            programs = max(int(cut.programs * PROCESSORS / heads.kv), 1)
            made = cut._replace(programs=programs, queries=self.tokens)
            if made != taken:
                name = f"{cut.tile}x{cut.warps}w{cut.stages}s{cut.programs}p"
                found[name + (f" least {cut.least}" if cut.least > 1 else "")] = made
        return found


CASES = [
    Case(shape, rows, tokens, keys)
    for keys, tokens, rows, shape in product((1024, 4096), (4, 8), (256, 32, 1, 128), SHAPES)
]


class Rows(NamedTuple):
    """Tokens of rows as a step has them: slot and length of each."""

    slots: Tensor
    lengths: Tensor


def queries(kept: Pages, tokens: int) -> Rows:
    """Each row's last `tokens`."""
    slots = kept.slots.repeat_interleave(tokens)
    before = torch.arange(tokens - 1, -1, -1, device=slots.device).repeat(len(kept.slots))
    return Rows(slots.int(), (kept.lengths[slots] - before).int())


def call_of(kept: Pages, rows: Rows, q: Tensor, heads: Heads, config: DecodeConfig) -> Callable[[], Tensor]:
    """A call of `paged_decode`, its plan made."""
    plan = plan_decode(*rows, config, longest=config.queries)
    space = decode_workspace(len(q), heads.q, heads.kv, heads.dim, config, q.device)
    return partial(paged_decode, q, kept.layer(PAGE, heads.dim**-0.5), plan, space, config, pdl=True)


def compile_cut(heads: Heads, config: DecodeConfig) -> None:
    """Compile a cut into Triton's cache, in a process of the pool."""
    slots, table = torch.zeros(16, dtype=torch.int32), torch.zeros(16, 64, dtype=torch.int32)
    both = torch.empty(64, 2, heads.kv, heads.dim, dtype=torch.bfloat16)
    q = torch.empty(16, heads.q, heads.dim, dtype=torch.bfloat16)
    with compiling():
        plan = plan_decode(slots, slots, config, longest=config.queries)
        space = decode_workspace(16, heads.q, heads.kv, heads.dim, config, q.device)
        layer = Layer(both[:, 0], both[:, 1], table, PAGE, heads.dim**-0.5)
        paged_decode(q, layer, plan, space, config, pdl=True)


def compile_cuts() -> None:
    """Compile all cuts, in parallel."""
    found = set()
    for case in CASES:
        heads = SHAPES[case.shape]
        every = [*case.cuts().values(), case.plain(case.rows), case.plain(case.rows * case.tokens)]
        # The numbers of programs are no constants of the kernel, and `least` is one of the plan.
        found |= {(heads, cut._replace(programs=16, least=1)) for cut in every}
    compile_all([partial(compile_cut, *each) for each in sorted(found)], 60)


class Bench:
    """Pages and times of the cases that share them."""

    def __init__(self, case: Case) -> None:
        self.case, self.heads = case, SHAPES[case.shape]
        # A page less in all rows but one: with 8 heads, 256 rows of 4,096 keys need offsets of 64 bits, which
        # cost registers; a server's pages do not.
        self.lengths = [case.keys] + [case.keys - PAGE] * (case.rows - 1)
        self.moved = 2 * sum(self.lengths) * self.heads.kv * self.heads.dim * 2
        sets = max(1, min(16, int(100e6 / self.moved)))  # together larger than the L2 cache
        self.kept = [
            inputs.pages(self.lengths, PAGE, self.heads, torch.bfloat16, DEVICE) for _ in range(sets)
        ]
        tokens = case.rows * case.tokens
        self.q = torch.randn(tokens, self.heads.q, self.heads.dim, device=DEVICE).bfloat16()

    def calls(self, tokens: int, config: DecodeConfig) -> list[Callable[[], Tensor]]:
        """Calls with each set of pages, for `tokens` tokens a row."""
        q = self.q[: tokens * self.case.rows]
        return [call_of(kept, queries(kept, tokens), q, self.heads, config) for kept in self.kept]

    def expected(self) -> Tensor:
        """Results of the plain kernel, the first 16 tokens checked against plain torch."""
        case, kept = self.case, self.kept[0]
        (slots, lengths), q = queries(kept, case.tokens), self.q[:16]
        found = self.calls(case.tokens, case.plain(len(self.q)))[0]().view_as(self.q)
        some, cache = slots[: len(q)].long(), (kept.k, kept.v)
        seen, scale = lengths[: len(q)].tolist(), self.heads.dim**-0.5
        right, _ = reference.decode_attention(q, cache, kept.table[some], seen, PAGE, scale)
        assert (wrong := error(found[: len(q)], right)) < 1e-2, f"{case}: the plain kernel is off by {wrong}"
        return found

    def us(self, tokens: int, config: DecodeConfig) -> float:
        """Microseconds of a call with `tokens` tokens a row."""
        calls = self.calls(tokens, config)
        least = max(2, min(len(calls) * 2, int(2e-3 * BANDWIDTH / self.moved)))
        return microseconds(calls, replays=5, least=least)

    def run(self) -> dict[str, Any]:
        """Microseconds of one token a row, plainly and in a graph for more; of all tokens, as rows each and
        by each cut."""
        case, expected = self.case, self.expected()
        cuts, found = case.cuts(), {}
        taken = cuts["taken"]
        found["one token"] = self.us(1, case.plain(case.rows))
        found["one token, taken"] = self.us(1, taken)
        found["rows each"] = self.us(case.tokens, case.plain(len(self.q)))
        off = {}
        for name, config in cuts.items():
            try:
                call = self.calls(case.tokens, config)[0]
                off[name] = max(error(call().view_as(expected), expected) for _ in range(2))
                found[name] = self.us(case.tokens, config)
            except (TritonError, RuntimeError) as failure:
                torch.cuda.synchronize()  # raises again if the error is of the device, not of the compiler
                print(f"dropped {case} {name}: {str(failure)[:80]}", flush=True)
        if wrong := {name: each for name, each in off.items() if not each < 1e-2}:
            print(f"WRONG {case}: {wrong}", flush=True)
        bound = 1e6 * self.moved / BANDWIDTH
        return {
            **case._asdict(), "bound_us": bound, "us": found, "wrong": sorted(wrong),
            "taken": list(taken), "tb_s": self.moved / found["taken"] / 1e6,
        }  # fmt: skip


def plans() -> Iterator[str]:
    """Times of the plan, which is made once a step: each token a row, and found by slots."""
    for rows, tokens in ((32, 8), (256, 4), (256, 8)):
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE).repeat_interleave(tokens)
        lengths = 1000 + torch.arange(tokens, dtype=torch.int32, device=DEVICE).repeat(rows)
        case = Case("8b", rows, tokens, 1024)
        each = microseconds([partial(plan_decode, slots, lengths, case.plain(len(slots)))])
        cut = case.cuts()["taken"]
        once = microseconds([partial(plan_decode, slots, lengths, cut, longest=tokens)])
        yield f"plan of {rows} x {tokens}: {each:.1f} us with rows each, {once:.1f} us by slots"


def line(found: dict[str, Any]) -> str:
    """A case, its best cut and all others."""
    us, cuts = found["us"], list(found["us"])[3:]
    best = min(cuts, key=us.__getitem__)
    others = "  ".join(f"{name} {us[name]:.1f}" for name in cuts if name != "taken")
    case = "{shape:3} {rows:3} x {tokens} x {keys}  bound {bound_us:7.1f}".format(**found)
    one = f"one {us['one token']:7.1f} {us['one token, taken']:7.1f}  each {us['rows each']:7.1f}"
    return f"{case}  {one}  taken {us['taken']:7.1f} ({found['tb_s']:.2f} TB/s)  best {best}  | {others}"


def main(argv: list[str] | None = None) -> int:
    """Check and time, print a line for each case, and save after each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args(argv)
    began = time.monotonic()
    compile_cuts()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "bandwidth": BANDWIDTH, "cases": []}
    print("us: one token a row plainly, and in a graph for more; all tokens as rows each, and cut as taken")
    for case in CASES:
        if time.monotonic() - began > args.seconds:
            print(f"out of time at {case}", flush=True)
            break
        found = Bench(case).run()
        results["cases"].append(found)
        print(line(found), flush=True)
        (args.out / "verify.json").write_text(json.dumps(results, indent=1))
    print(*plans(), f"{time.monotonic() - began:.0f} s", sep="\n")
    return int(any(each["wrong"] for each in results["cases"]))


if __name__ == "__main__":
    sys.exit(main())
