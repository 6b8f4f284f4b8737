"""The contract of every attention backend: one suite, every backend, steps as a graph would hold them.

Page 0, the tails of pages and whatever stale entries of the page table point to are NaN. The torch
backend of the CPU is given zeros there: it clears the tails of pages that it begins, and no step writes
its page 0.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, cast

import pytest
import torch
from torch import Tensor

from bench.kernels import reference
from bench.kernels.inputs import Heads, chunks, error, pages
from gpu.attention import TorchAttention
from gpu.attention.backend import AttentionBackend, AttentionConfig, Cache
from gpu.attention.selector import PhasedAttention, device_attention
from gpu.attention.triton_paged import TritonDecode, TritonPrefill
from gpu.device import CudaFacts, cuda_facts
from gpu.kernels.attention.decode_config import DecodeConfig, decode_config, verify_config
from gpu.kv.pool import KvPool
from gpu.state.view import StepView
from gpu.step.shapes import query_sizes

CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
HOPPER = CudaFacts("", "NVIDIA H200", (9, 0), 132)
GPU = cuda_facts() if CUDA else HOPPER._replace(processors=2)
"""Facts of the GPU; the interpreter gets those of Hopper, with two processors."""


class Case(NamedTuple):
    """A step: lengths of decode rows, (start, tokens) of chunks, padding in rows, decode rows, chunks.

    Layer 0 sees everything, layer 1 `window` positions. All decode rows share their first `common` keys.
    Decode rows have a token each or `tokens`, and a graph's attention up to `query` of a row at once. Where
    `values` are given, keys are latents: these are so many of a key's columns.
    """

    heads: Heads = Heads(4, 2, 16)
    page: int = 16
    decode: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    pad: tuple[int, int, int] = (0, 0, 0)
    window: int = 9
    cap: float = 0.0
    common: int = 0
    cascade: bool = False
    deep: bool = False
    tokens: tuple[int, ...] = ()
    query: int = 1
    sinks: bool = False
    values: int = 0

    @property
    def decoded(self) -> list[tuple[int, int]]:
        """Row and length of each token of decode rows."""
        each = enumerate(zip(self.decode, self.tokens or [1] * len(self.decode), strict=True))
        return [(row, end - count + 1 + i) for row, (end, count) in each for i in range(count)]


CASES = {
    "decode": Case(decode=(1, 40, 17)),
    "one row": Case(decode=(33,)),
    "decode, padded": Case(decode=(5, 40), pad=(3, 3, 0)),
    "chunks": Case(chunks=((0, 21), (0, 1), (0, 16))),
    "prefix hits": Case(chunks=((16, 20), (32, 1), (5, 30))),
    "chunks, padded": Case(chunks=((0, 9), (20, 7)), pad=(5, 0, 3)),
    "mixed": Case(decode=(30, 2), chunks=((16, 10), (0, 17))),
    "few queries, many keys": Case(Heads(4, 1, 16), chunks=((700, 5),), pad=(4, 1, 2), window=500, deep=True),
    "mixed, padded": Case(decode=(30, 2), chunks=((16, 10),), pad=(11, 6, 4)),
    "mixed, deep": Case(decode=(30, 2), chunks=((160, 10), (0, 3)), pad=(11, 6, 4), deep=True),
    "mixed graph without decode": Case(chunks=((0, 12),), pad=(4, 8, 2)),
    "mixed graph without chunks": Case(decode=(12, 20), pad=(4, 1, 2)),
    "pages of 1": Case(page=1, decode=(30, 2), chunks=((7, 10),), pad=(1, 0, 0)),
    "pages of 64": Case(page=64, decode=(130, 64, 65), chunks=((60, 10), (0, 64))),
    "group 1": Case(Heads(3, 3, 16), decode=(20, 3), chunks=((9, 20),)),
    "group 8": Case(Heads(8, 1, 16), decode=(20, 3), chunks=((9, 20),)),
    "group 7": Case(Heads(14, 2, 16), decode=(20, 3), chunks=((9, 20),)),
    "head_dim 8": Case(Heads(4, 2, 8), decode=(20, 3), chunks=((9, 20),)),
    "head_dim 64": Case(Heads(4, 2, 64), decode=(20, 3), chunks=((9, 20),)),
    "head_dim 80": Case(Heads(4, 2, 80), decode=(20, 3), chunks=((9, 20),)),
    "head_dim 128": Case(Heads(4, 2, 128), decode=(20, 3), chunks=((9, 20),)),
    "head_dim 256": Case(Heads(4, 2, 256), decode=(20, 3), chunks=((9, 20),)),
    "soft cap": Case(decode=(40, 3), chunks=((9, 20),), cap=1.5),
    "window of 1": Case(decode=(40, 3), chunks=((9, 20),), window=1),
    "cascade, nothing shared": Case(decode=(40, 33, 50), cascade=True),
    "cascade": Case(decode=(40, 33, 50), common=32, cascade=True),
    "cascade, padded": Case(decode=(40, 33, 50), common=16, cascade=True, pad=(3, 3, 0)),
    "cascade, mixed": Case(decode=(40, 33), chunks=((16, 10),), common=32, cascade=True, pad=(3, 1, 2)),
    "cascade, soft cap": Case(decode=(40, 33, 50), common=32, cascade=True, cap=1.5),
    "shared but no cascade": Case(decode=(40, 33, 50), common=32),
    **{
        f"drafts, {name}": case._replace(query=query)
        for query in (1, 4)
        for name, case in {
            f"{query} at once": Case(decode=(65, 40, 18, 4), tokens=(4, 1, 3, 2), pad=(3, 3, 0)),
            f"{query} at once, mixed": Case(
                decode=(33, 70), tokens=(3, 4), chunks=((16, 10), (0, 3)), pad=(9, 5, 2), deep=True
            ),
            f"{query} at once, cascade": Case(
                decode=(40, 36, 50), tokens=(4, 2, 1), common=32, cascade=True, cap=1.5
            ),
        }.items()
    },
    "drafts, none": Case(decode=(1, 40, 17), query=4),
    "drafts, group 7": Case(Heads(14, 2, 16), decode=(65, 40), tokens=(8, 5), query=8),
    "drafts, group 1": Case(Heads(3, 3, 16), decode=(65, 40), tokens=(8, 5), query=8, window=3),
    "drafts, longer than a tile of queries": Case(Heads(8, 1, 16), decode=(65, 40), tokens=(9, 5), query=9),
    "latents": Case(Heads(32, 1, 24), decode=(40, 3, 17), chunks=((9, 20), (0, 3)), values=16),
    "latents, no powers of two": Case(
        Heads(20, 1, 52), page=64, decode=(130, 64, 65), chunks=((60, 10), (0, 70)), values=40
    ),
    "latents, padded": Case(
        Heads(3, 1, 24), page=1, decode=(30, 2), chunks=((7, 10),), pad=(4, 2, 1), values=16
    ),
    "latents, deep": Case(Heads(4, 1, 24), chunks=((300, 10), (0, 3)), pad=(2, 0, 1), deep=True, values=16),
    "latents, cascade": Case(Heads(4, 1, 24), decode=(40, 33), common=32, cascade=True, values=16),
    "latents, drafts": Case(
        Heads(16, 1, 24), decode=(65, 40, 4), tokens=(4, 3, 2), pad=(3, 3, 0), query=4, values=16
    ),
    "latents of 512 + 64": Case(Heads(16, 1, 576), decode=(20, 3), chunks=((9, 20),), values=512),
    "drafts, head_dim 256": Case(Heads(4, 2, 256), decode=(20, 8), tokens=(2, 3), query=3),
}
CASES |= {
    f"sinks, {name}": CASES[name]._replace(sinks=True)
    for name in (
        "decode, padded",
        "one row",
        "few queries, many keys",
        "mixed, deep",
        "group 7",
        "cascade, mixed",
        "drafts, 4 at once, mixed",
        "drafts, 4 at once, cascade",
    )
} | {"sinks, a long chunk": Case(chunks=((5, 150),), window=70, sinks=True)}


class Pages(NamedTuple):
    """K and V by layer, as a pool that has no more to say."""

    of: list[tuple[Tensor, Tensor]]

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return self.of


def bind(backend: AttentionBackend, caches: list[tuple[Tensor, Tensor]]) -> None:
    backend.bind(cast("KvPool", Pages(caches)))


class Step(NamedTuple):
    """A case as tensors, and what is right."""

    case: Case
    view: StepView
    cache: tuple[Tensor, Tensor]
    q: Tensor
    expected: list[Tensor]
    sinks: list[Tensor | None]

    @property
    def live(self) -> int:
        return len(self.case.decoded) + sum(count for _, count in self.case.chunks)

    @property
    def config(self) -> AttentionConfig:
        case, q = self.case, self.q
        return AttentionConfig(
            *case.heads,
            windows=(0, case.window),
            page_size=case.page,
            max_rows=max(self.view.max_decode, 1),
            dtype=q.dtype,
            device=q.device,
            gpu=GPU,
            scale=case.heads.dim**-0.5,
            cap=case.cap,
            cascade_rows=int(case.cascade),
            query=case.query,
            sinks=case.sinks,
            values=case.values,
        )


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(case: Case, dtype: torch.dtype, device: torch.device) -> Step:
    """One more row than the case has owns the page of NaN that stale entries point to."""
    rows, parts = len(case.decode), len(case.chunks)
    lengths = [*case.decode, *(start + count for start, count in case.chunks), case.page]
    kept = pages(lengths, case.page, case.heads, dtype, device)
    if case.values:
        kept = kept._replace(v=kept.k[..., : case.values])
    bad = int(kept.table[kept.slots[-1], 0])
    for side in (kept.k, kept.v):
        side[bad * case.page : (bad + 1) * case.page] = float("nan")
    table = kept.table
    for slot, length in zip(kept.slots[:-1].tolist(), lengths[:-1], strict=True):
        table[slot, -(-length // case.page) :] = bad
    table[kept.slots[:rows], : case.common // case.page] = table[kept.slots[:1], : case.common // case.page]
    table[0] = 0
    pad, pad_decode, pad_chunks = case.pad
    owner, seen = [list(each) for each in zip(*case.decoded, strict=True)] or [[], []]
    tokens = len(owner)
    cut = chunks(list(case.chunks), kept._replace(slots=kept.slots[rows:]), tokens, device)
    n = tokens + sum(count for _, count in case.chunks) + pad
    max_chunks = parts + pad_chunks
    blank = ints([0] * n, device)
    view = StepView(
        tokens=n,
        max_decode=tokens + pad_decode,
        max_chunks=max_chunks,
        counts=ints([n - pad, tokens, parts, tokens], device),
        ids=blank,
        positions=blank,
        kv_slot_mapping=blank,
        page_table=table,
        decode_slots=ints([*kept.slots[owner].tolist(), *[0] * pad_decode], device),
        decode_lengths=ints([*seen, *[1] * pad_decode], device),
        chunk_slots=ints([*cut.slots[:parts].tolist(), *[0] * pad_chunks], device),
        chunk_starts=ints([*cut.starts[:parts].tolist(), *[0] * pad_chunks], device),
        chunk_firsts=ints([*cut.firsts[: parts + 1].tolist(), *[0] * pad_chunks], device),
        common=ints([case.common], device),
        shared=case.cascade,
        deep=case.deep,
        query=case.query,
    )
    q = torch.randn(n, case.heads.q, case.heads.dim, device=device).to(dtype)
    q[n - pad :] = float("nan")
    cache, own = (kept.k, kept.v), table[kept.slots]
    expected, sinks = [], []
    for window in (0, case.window):
        args = (case.page, case.heads.dim**-0.5)
        sinks.append(torch.randn(case.heads.q, device=device).to(dtype) if case.sinks else None)
        more = {"cap": case.cap, "window": window, "sinks": sinks[-1]}
        out = reference.prefill_attention(q, cache, own[rows:-1], cut.true, *args, **more)
        out[:tokens] = reference.decode_attention(q[:tokens], cache, own[owner], seen, *args, **more)[0]
        expected.append(out[: n - pad].flatten(1))
    return Step(case, view, cache, q, expected, sinks)


def check(step: Step, backend: AttentionBackend, tolerance: float) -> None:
    backend.plan(step.view)
    for layer, expected in enumerate(step.expected):
        found = backend.attend(layer, step.q, step.view, step.sinks[layer])
        assert found.shape == (step.view.tokens, expected.shape[1])
        assert error(found[: step.live], expected) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_triton(name: str, device: torch.device, tolerance: float) -> None:
    step = make(CASES[name], DTYPE, device)
    backend = device_attention(step.config, "triton")
    bind(backend, [step.cache, step.cache])
    check(step, backend, tolerance)


class CarelessDecode(TritonDecode):
    """Writes all rows that the graph has for it, as XQA does."""

    def attend(
        self, layer: int, q: Tensor, cache: Cache, view: StepView, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        out[: view.max_decode] = float("nan")
        super().attend(layer, q, cache, view, out, sinks)


@pytest.mark.parametrize("name", ["mixed, padded", "mixed graph without decode"])
def test_chunks_keep_their_rows(name: str, device: torch.device, tolerance: float) -> None:
    step = make(CASES[name], DTYPE, device)
    backend = PhasedAttention(TritonPrefill(step.config), CarelessDecode(step.config))
    bind(backend, [step.cache, step.cache])
    check(step, backend, tolerance)


@pytest.mark.parametrize("most", [3, 20, 100, 512])
def test_partial_results_have_room_in_every_graph(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of some rows have more programs than those of one row and than the largest."""
    made: list[DecodeConfig] = []

    def record(rows: int, heads: int, kv: int, dim: int, config: DecodeConfig, device: torch.device) -> None:
        made.append(config)

    monkeypatch.setattr("gpu.attention.triton_paged.decode_workspace", record)
    TritonDecode(
        AttentionConfig(32, 8, 128, (0,), 16, most, torch.bfloat16, torch.device("cpu"), HOPPER, 0.1)
    )
    (space,) = made
    for rows in range(1, most + 1):
        for few in (False, True):
            assert space.programs >= decode_config(128, 8, 132, rows, group=4, few=few).programs


@pytest.mark.parametrize("most", [3, 20, 100, 1024])
def test_partial_results_of_drafts_have_room_in_every_graph(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DecodeConfig] = []
    monkeypatch.setattr("gpu.attention.triton_paged.decode_workspace", lambda *args: made.append(args[4]))
    for longest, heads in product((2, 4, 8, 16), (8, 32, 64)):
        config = AttentionConfig(
            heads, 8, 128, (0,), 16, most, torch.bfloat16, torch.device("cpu"), HOPPER, 0.1, query=longest
        )
        TritonDecode(config)
        room = made[-1].programs * made[-1].queries
        for tokens, query, few in product(range(1, most + 1, 3), query_sizes(longest - 1), (False, True)):
            if query > 1:
                cut = verify_config(128, 8, 132, tokens, query, group=heads // 8, few=few)
                assert room >= cut.programs * cut.queries


@pytest.mark.gpu
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "name",
    ["chunks", "prefix hits", "chunks, padded", "mixed", "mixed, padded", "mixed graph without chunks"],
)
def test_flashinfer(name: str, deep: bool, device: torch.device, tolerance: float) -> None:
    """By FA3, and as deep graphs go. Heads of 128 alone: every other width, window or cap is a minute of
    its compiler."""
    pytest.importorskip("flashinfer")
    case = CASES[name]
    step = make(case._replace(heads=case.heads._replace(dim=128), deep=deep), torch.bfloat16, device)
    backend = device_attention(step.config, "prefill=flashinfer")
    bind(backend, [step.cache, step.cache])
    check(step, backend, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [((0, 900), (950, 30), (333, 800)), ((0, 900), (9_500, 30), (33, 80))])
def test_flashinfer_packs_keys_where_it_pays(
    chunks: tuple[tuple[int, int], ...], device: torch.device, tolerance: float
) -> None:
    """Packing pays for the first of these steps, and not for the second."""
    pytest.importorskip("flashinfer")
    step = make(Case(Heads(8, 2, 128), decode=(30, 2), chunks=chunks, pad=(7, 3, 2)), torch.bfloat16, device)
    backend = device_attention(step.config._replace(windows=(0, 0)), "prefill=flashinfer")
    bind(backend, [step.cache, step.cache])
    check(step._replace(expected=[step.expected[0]] * 2), backend, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chunks",
    [((0, 900), (950, 30), (333, 800)), ((0, 900), (9_500, 30), (33, 80)), ((0, 40), (20, 3))],
    ids=["packed", "in pages", "few"],
)
def test_flashinfer_over_float8_pages(chunks: tuple[tuple[int, int], ...], device: torch.device) -> None:
    """Chunks and decode rows over float8 pages. FA3 computes the chunks if their keys are packed."""
    pytest.importorskip("flashinfer")
    step = make(Case(Heads(8, 2, 128), decode=(30, 2), chunks=chunks, pad=(7, 3, 2)), torch.bfloat16, device)
    scales = 0.5, 2.0
    coarse, same = [], []
    for side, scale in zip(step.cache, scales, strict=True):
        coarse.append((side.nan_to_num(0.0) / scale).to(torch.float8_e4m3fn))
        same.append((coarse[-1].float() * scale).to(side.dtype))
    config, found = step.config._replace(windows=(0, 0)), []
    for own, cache in ((config._replace(kv_scales=scales), coarse), (config, same)):
        backend = device_attention(own, "prefill=flashinfer")
        bind(backend, [(cache[0], cache[1])] * 2)
        if own.kv_scales is not None:
            check(
                step._replace(expected=[step.expected[0]] * 2), backend, 0.06
            )  # three bits behind the point
        backend.plan(step.view)
        found.append(backend.attend(0, step.q, step.view)[: step.live])
    assert error(*found) < 6e-3


XQA_CASES = {
    name: CASES[name]._replace(heads=Heads(16, 2, 128))
    for name in ("decode", "decode, padded", "mixed, padded", "mixed graph without chunks", "cascade, mixed")
} | {
    "many rows, many keys": Case(Heads(16, 2, 128), decode=(1, 16, 17, 700, 64, 65) * 12, pad=(5, 5, 0)),
    "pages of 64": Case(Heads(16, 2, 128), page=64, decode=(130, 64, 65, 700), window=70),
}
"""Heads of 128 in eights alone: every other width, group, page or window is a quarter of a minute of its
compiler. A row of 700 keys is divided among processors where rows are few, and not where they are many."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", XQA_CASES)
def test_xqa(name: str, device: torch.device, tolerance: float) -> None:
    pytest.importorskip("flashinfer")
    step = make(XQA_CASES[name], torch.bfloat16, device)
    backend = device_attention(step.config, "prefill=triton,decode=flashinfer")
    bind(backend, [step.cache, step.cache])
    for _ in range(2):  # the second finds the counters as the first left them
        check(step, backend, tolerance)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.cap])
def test_torch(name: str) -> None:
    cpu = torch.device("cpu")
    step = make(CASES[name], torch.float32, cpu)
    case, view, heads = step.case, step.view, step.case.heads
    rows, table = len(case.decoded), view.page_table
    kept, sides = (heads.kv, heads.dim, case.values), step.cache[:1] if case.values else step.cache
    pool = KvPool(2, len(step.cache[0]) // case.page, case.page, kept, torch.float32, cpu)
    for layer in range(2):
        for kind, side in enumerate(sides):
            pool.data[layer, :, :, kind] = side.nan_to_num(0.0).unflatten(0, (-1, case.page))
    counts = view.counts.tolist()
    seen = [length for _, length in case.decoded]
    owners = [(slot, length - 1, 1) for slot, length in zip(view.decode_slots, seen, strict=False)]
    owners += [(slot, *chunk) for slot, chunk in zip(view.chunk_slots, case.chunks, strict=False)]
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in owners])
    owner = torch.cat([torch.full((count,), int(slot)) for slot, _, count in owners])
    where = table[owner, positions // case.page].long() * case.page + positions % case.page
    exact = view._replace(
        tokens=step.live,
        max_decode=rows,
        max_chunks=counts[2],
        ids=view.ids[: step.live],
        positions=positions.int(),
        kv_slot_mapping=where.int(),
    )
    backend = TorchAttention([0, case.window], sinks=case.sinks, values=case.values)
    backend.bind(pool)
    backend.plan(exact)
    kv = torch.stack([side[where] for side in sides], 1)
    for layer, expected in enumerate(step.expected):
        backend.store(layer, kv)
        found = backend.attend(layer, step.q[: step.live], exact, step.sinks[layer])
        assert error(found, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name",
    ["mixed, padded", "cascade, mixed", "head_dim 128", "drafts, 4 at once, mixed", "latents of 512 + 64"],
)
def test_triton_in(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Other dtypes than the interpreter's one and a GPU's first."""
    step = make(CASES[name], dtype, device)
    backend = device_attention(step.config, "triton")
    bind(backend, [step.cache, step.cache])
    check(step, backend, 2e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize(
    "name",
    ["decode", "mixed, padded", "cascade, mixed", "few queries, many keys", "drafts, 4 at once, mixed"],
)
def test_float8_pages(name: str, device: torch.device) -> None:
    step = make(CASES[name], DTYPE, device)
    k_scale, v_scale = 0.5, 2.0
    cache = step.cache[0] / k_scale, step.cache[1] / v_scale
    coarse = [side.nan_to_num(0.0).to(torch.float8_e4m3fn) for side in cache]
    backend = device_attention(step.config._replace(kv_scales=(k_scale, v_scale)), "triton")
    bind(backend, [(coarse[0], coarse[1])] * 2)
    check(step, backend, 0.06)  # three bits behind the point


@pytest.mark.parametrize(
    "case",
    [
        Case(Heads(4, 1, 64), page=64, decode=(32_000,)),
        Case(Heads(2, 1, 64), page=64, chunks=((31_990, 4),), deep=True),
    ],
    ids=["decode", "few queries"],
)
def test_float8_pages_of_32000_keys(case: Case, device: torch.device) -> None:
    """The error is that of rounding to e4m3, averaged over all keys, and not more: the bounds of
    core/schedule/README.md."""
    step = make(case, DTYPE, device)
    coarse = [side.nan_to_num(0.0).to(torch.float8_e4m3fn) for side in step.cache]
    same = [side.to(DTYPE) for side in coarse]
    found = []
    for config, cache in ((step.config._replace(kv_scales=(1.0, 1.0)), coarse), (step.config, same)):
        backend = device_attention(config, "triton")
        bind(backend, [(cache[0], cache[1])] * 2)
        backend.plan(step.view)
        found.append(backend.attend(0, step.q, step.view)[: step.live])
    assert error(found[0], step.expected[0]) < 0.06
    assert error(*found) < (6e-3 if CUDA else 1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("name", "backends"),
    [
        *((name, "triton") for name in ("mixed, padded", "cascade, mixed", "few queries, many keys")),
        *((f"drafts, 4 at once{kind}", "triton") for kind in ("", ", mixed", ", cascade")),
        *((f"latents, {kind}", "triton") for kind in ("padded", "deep", "drafts")),
        ("mixed, padded", "prefill=triton,decode=flashinfer"),
    ],
)
def test_a_captured_step_reads_what_the_device_says(
    name: str, backends: str, pdl: bool, device: torch.device
) -> None:
    """A graph captured over a step without any true row serves another, bitwise as without a graph."""
    if "flashinfer" in backends:
        pytest.importorskip("flashinfer")
    step = make((CASES if backends == "triton" else XQA_CASES)[name], torch.bfloat16, device)
    backend = device_attention(step.config._replace(pdl=pdl), backends)
    bind(backend, [step.cache, step.cache])
    backend.plan(step.view)
    expected = [backend.attend(layer, step.q, step.view) for layer in range(2)]
    counts = step.view.counts.clone()
    step.view.counts.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.plan(step.view)
        found = [backend.attend(layer, step.q, step.view) for layer in range(2)]
    graph.replay()
    step.view.counts.copy_(counts)
    for _ in range(3):
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[: step.live], other[: step.live])
