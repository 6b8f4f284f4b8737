"""Bytes to pages: what fits, decided before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from core.config import CacheConfig
from core.errors import ConfigError
from core.models import ModelSpec
from core.models.quant import MXFP4_GROUP
from gpu.kv.pool import KvPool
from gpu.kv.states import StatePool
from gpu.quant import q4
from gpu.quant.scaled import FP8

GIB = 2**30

CPU_FRACTION = 0.3
CPU_POOL_LIMIT = 4 * GIB
"""A CPU's memory belongs to others too, and a guess this size already holds 93,000 tokens of the
default model. Who wants more says --mem-fraction or --kv-tokens."""

GPU_FRACTION = 0.9
"""Share that pages get of what weights and `Needs` leave on a GPU. `Needs` are reasoned, not measured: the
tenth that is left covers their error and fragmentation. A pool filled to the edge fails in the first hour,
not at start."""

SHORTEST_CONTEXT = 512
"""Tokens of the shortest pool that is chosen by itself: one chat turn. An explicit --kv-tokens may
be smaller."""

NODES = 12
NODE_BYTES = 4096
"""Kernels of a layer in a graph, at most (`gpu.ops.fused`), and what a captured one takes."""

SLACK = 1.5
"""A graph's allocations over the most that lives at once: blocks are rounded and reused by size."""

WORKSPACE = 512 * 2**20
"""cuBLAS's (32 MiB a stream), split attention's partial results, the step's buffers, kernels' code."""

SCORED = 3 * 256
"""Rows of logits that prompt log-probabilities take: 256 positions at once, and two copies."""

CHECKPOINTS = 1 / 3
"""Share of the KV pool's memory that holds checkpoints of linear attention states. A checkpoint of
Qwen3.5-9B takes 50 MiB, like the keys and values of 1,600 tokens: a third is one for every 3,200 tokens."""

COUNT_BYTES = 5
"""Bytes that a penalised row takes per vocabulary entry (`gpu.sample.penalties`)."""


def page_dtype(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of pages for a model that computes in `dtype`."""
    return FP8 if cache.kv_dtype == "fp8" else dtype


class Needs(NamedTuple):
    """What a device has to hold beside weights and pages, in bytes."""

    graphs: int = 0
    logits: int = 0
    counts: int = 0
    workspace: int = 0
    drafts: int = 0
    adapters: int = 0
    page: int = 0
    """Bytes of a draft model's KV in each page, beside the target's."""

    @property
    def fixed(self) -> tuple[int, ...]:
        """All but what depends on the number of pages."""
        return self[:-1]


class MemoryPlan(NamedTuple):
    """What goes where, in bytes; `num_pages` includes the dump page 0."""

    available: int
    weights: int
    page_bytes: int
    num_pages: int
    page_size: int
    needs: Needs = Needs()
    kv_dtype: str = ""
    weight_dtype: str = ""
    checkpoints: int = 0
    state_bytes: int = 0
    """Bytes of a checkpoint of linear attention's states."""
    slots: int = 0
    """Slots that have states of linear attention."""
    slot_bytes: int = 0
    """Bytes of a slot's states of linear attention."""

    @property
    def pool(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def tokens(self) -> int:
        """Tokens the usable pages hold."""
        return (self.num_pages - 1) * self.page_size

    @property
    def left(self) -> int:
        states = self.slots * self.slot_bytes + self.checkpoints * self.state_bytes
        return self.available - self.weights - sum(self.needs.fixed) - self.pool - states


def device_needs(
    spec: ModelSpec, dtype: torch.dtype, rows: int, step_tokens: int, graphs: int, samples: int = 0
) -> Needs:
    """What a GPU needs for `graphs` captured forwards of up to `step_tokens` tokens and `rows` rows, each
    of which may be penalised, with `samples` samples, 0 for one of each row. Reasoned from sizes, nothing is
    allocated.

    Graphs share one pool, so the largest decides; the warm-up runs of the same steps take as much again,
    outside it. Logits of all samples stand there three times: those of a graph, those that rows with options
    are sampled from, and what is set aside of these for log-probabilities.
    """
    step = int(SLACK * step_tokens * _activation_bytes(spec, dtype)) + _restored_bytes(spec, dtype)
    nodes = NODES
    if spec.transformers:
        nodes = 6 * NODES  # of a Qwen3-8B, which launches some 50 a layer there
    elif spec.latent:
        nodes = 3 * NODES  # of DeepSeek V3 in FP8: 15 for attention, 7 for experts, 5 for the shared one
    return Needs(
        graphs=step + graphs * spec.layers * nodes * NODE_BYTES,
        logits=(3 * (samples or rows) + SCORED) * spec.vocab_size * 4,
        counts=rows * spec.vocab_size * COUNT_BYTES,
        workspace=step + WORKSPACE,
    )


def _activation_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """The most that one token of a step holds at once."""
    attention = (3 + 3 * spec.output_gate) * spec.q_size + 2 * spec.kv_size
    if (linear := spec.linear) is not None:  # gates and norms in float32
        attention = max(attention, 3 * linear.channels + 10 * linear.value_size)
    if (latent := spec.latent) is not None:  # queries before and behind the latents, results likewise
        each = latent.query_dim + spec.head_dim + latent.kv_rank + latent.value_dim
        attention = spec.heads * each + latent.q_rank + spec.head_dim
    mlp = 3 * spec.intermediate
    if (moe := spec.moe) is not None:
        routed = moe.per_token * (moe.intermediate + spec.hidden) + 2 * moe.experts
        routed += 3 * moe.shared + spec.hidden * (moe.shared > 0)
        mlp = max(mlp, routed) if len(moe.layers) < spec.layers else routed
    if spec.transformers:  # norms in float32, and copies between operations that ours do in place
        return 2 * (3 * spec.hidden + max(attention, mlp)) * dtype.itemsize
    # Beside a product's input, what it was quantised to.
    coarse = max(3 * spec.hidden, spec.q_size, mlp) // 3 if spec.eight_bits else 0
    return (3 * spec.hidden + 2 * spec.head_dim + max(attention, mlp)) * dtype.itemsize + coarse


def _restored_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the largest 4-bit matrix once products of many rows have dequantised it to `dtype`. Experts
    are never dequantised."""
    if spec.int4 is None:
        return 0
    attention = spec.hidden * (spec.q_size + 2 * spec.kv_size)
    if (latent := spec.latent) is not None:
        queries = (latent.q_rank or spec.hidden) * spec.heads * latent.query_dim
        attention = max(queries, spec.hidden * spec.heads * latent.value_dim)
    width = spec.intermediate
    if (moe := spec.moe) is not None and len(moe.layers) == spec.layers:
        width = moe.shared
    return max(attention, spec.hidden * 2 * width) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken on a device now; on a GPU others' and torch's own caches count as taken."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be taken without swapping: the machine's, or the container's where less."""
    free = _machine_bytes(proc)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - int(stat.get("anon", 0)), 0))


def _machine_bytes(proc: Path) -> int:
    try:
        for line in proc.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def plan_memory(
    spec: ModelSpec,
    dtype: torch.dtype,
    cache: CacheConfig,
    available: int,
    most_tokens: int,
    needs: Needs | None = None,
    loaded: int = 0,
) -> MemoryPlan:
    """Weights first, then what the device needs, then as many pages as allowed, at most for `most_tokens`.

    `needs` are a GPU's; without, it is planned for a CPU. `loaded` is what weights that lie there already
    were measured to take, beside what is `available` now.

    Raises `ConfigError` with need, have and the flag to change.
    """
    parameters = spec.num_parameters()
    copied = _copied(spec, dtype, on_cpu=needs is None)
    parameters += copied
    kinds = _weight_name(spec, dtype)
    weights = loaded or weight_bytes(spec, parameters, spec.table_parameters() + copied, dtype)
    available += loaded
    if weights > available:
        raise ConfigError(
            f"Not enough memory: the weights ({parameters / 1e6:,.1f}M parameters in "
            f"{kinds}) need {_gib(weights)}, {_gib(available)} is free. "
            "Use a smaller --model" + (" or --dtype bfloat16." if dtype.itemsize > 2 else ".")
        )
    left = available - weights
    if needs is not None:
        left -= sum(needs.fixed)
        if left < 0:
            raise ConfigError(
                f"Not enough memory: graphs, logits and workspace need {_gib(sum(needs.fixed))}"
                f"{_adapters(needs)}, {_gib(available - weights)} is left beside the weights. "
                "Lower --step-tokens or --max-running, or use a smaller --model."
            )
    size = cache.page_size
    kept = page_dtype(cache, dtype)
    page_bytes = KvPool.page_bytes(spec.kv_layers, size, spec.kv_shape, kept)
    page_bytes += 0 if needs is None else needs.page
    state = StatePool.entry_bytes(spec.linear, dtype) * cache.radix_cache
    plan = MemoryPlan(
        available, weights, page_bytes, 0, size, needs or Needs(), _name(kept), kinds, state_bytes=state
    )
    if cache.kv_tokens:
        pages = -(-cache.kv_tokens // size) + 1
        if pages * page_bytes > left:
            raise ConfigError(
                f"Not enough memory: --kv-tokens {cache.kv_tokens} needs {_gib(pages * page_bytes)} "
                f"beside the weights, {_gib(left)} is left. Lower --kv-tokens."
            )
        room = min(left - pages * page_bytes, int(pages * page_bytes * CHECKPOINTS / (1 - CHECKPOINTS)))
        return plan._replace(num_pages=pages, checkpoints=min(room // max(state, 1), pages * bool(state)))
    budget = _budget(left, cache.mem_fraction, spec.ranks, on_cpu=needs is None)
    checkpoints = min(int(budget * CHECKPOINTS) // max(state, 1), -(-most_tokens // size) * bool(state))
    budget -= checkpoints * state
    pages = min(budget // max(page_bytes, 1), -(-most_tokens // size) + 1)
    least = -(-min(SHORTEST_CONTEXT, spec.context_length, most_tokens) // size) + 1
    if pages < least:
        raise ConfigError(
            f"Not enough memory: the KV pool needs at least {_gib(least * page_bytes)}, "
            f"{_gib(budget)} of the {_gib(left)} left beside the weights is set aside for it. "
            "Raise --mem-fraction, free memory, or use a smaller --model."
        )
    return plan._replace(num_pages=pages, checkpoints=checkpoints)


def _copied(spec: ModelSpec, dtype: torch.dtype, on_cpu: bool) -> int:
    """Weights that lie in memory though `num_parameters` does not count them, or do not though it does."""
    table = spec.vocab_rows * spec.hidden
    if spec.int8:
        return 0 if spec.tied else -table  # an embedding stays in its file
    # A packed head is a copy (`Decoder.seal`).
    return table if spec.tied and on_cpu and dtype == torch.float32 else 0


def with_states(
    spec: ModelSpec, dtype: torch.dtype, rows: int, available: int, drafts: int = 0
) -> tuple[int, int]:
    """Return the number of slots with states of linear attention and the bytes of each, with inputs of up to
    `drafts` drafts; (0, 0) without linear attention. Raises `ConfigError` if `rows` slots take most of what
    is `available`."""
    if spec.linear is None:
        return 0, 0
    each = StatePool.entry_bytes(spec.linear, dtype) + StatePool.pending_bytes(spec.linear, drafts, dtype)
    slots = rows + 2
    if slots * each > available // 2:
        raise ConfigError(
            f"Not enough memory: the states of {rows} running requests need {_gib(slots * each)}, "
            f"{_gib(available)} is free. Lower --max-running."
        )
    return slots, each


def _adapters(needs: Needs) -> str:
    if not needs.adapters:
        return ""
    return f" ({_gib(needs.adapters)} for adapters: --max-loras-per-batch, --max-lora-rank)"


def weight_bytes(spec: ModelSpec, parameters: int, tables: int, dtype: torch.dtype) -> int:
    """Bytes of so many parameters, `tables` among them. Routers count as 8 bits and the scales of 8-bit
    weights not at all: under 0.1% together. Weights of 4 bits have a scale and a zero point for each group,
    and layers that a checkpoint leaves unquantised count as quantised, in MXFP4 too; on a CPU their share is
    known."""
    if spec.mxfp4 is not None and (moe := spec.moe) is not None:
        packed = 3 * len(moe.layers) * moe.experts * spec.hidden * moe.intermediate
        return (parameters - packed) * dtype.itemsize + packed // 2 + packed // MXFP4_GROUP
    if not spec.held:
        tables = parameters
    if spec.held_tables:
        tables = 0
    each: float = FP8.itemsize
    if spec.int8:
        each -= spec.q4_share * (1 - q4.BYTES)
    if (int4 := spec.int4) is not None:
        each = 0.5 + (2 * dtype.itemsize / int4.group if int4.group else 0.0)
    return tables * dtype.itemsize + int((parameters - tables) * each)


def _weight_name(spec: ModelSpec, dtype: torch.dtype) -> str:
    if spec.mxfp4 is not None:
        return "mxfp4"
    if spec.int8 or spec.w8a8 is not None:
        return "int8 and q4" if spec.int8 and spec.q4_share else "int8"
    return "int4" if spec.int4 else _name(FP8 if spec.fp8 else dtype)


def _budget(left: int, fraction: float, ranks: int, on_cpu: bool) -> int:
    """Bytes that pages of each of `ranks` may take of what is left for each."""
    if fraction:
        return int(left * fraction)
    return min(int(left * CPU_FRACTION), CPU_POOL_LIMIT // ranks) if on_cpu else int(left * GPU_FRACTION)


def memory_table(plan: MemoryPlan) -> Sequence[str]:
    """Lines for the log; what a device does not need has none."""
    return [f"{what:<20} {_gib(size):>10}  {note}".rstrip() for what, size, note in _rows(plan)]


def memory_phrases(plan: MemoryPlan) -> tuple[str, ...]:
    """The parts of `plan`, without what was free before, as phrases for one line."""
    return tuple(f"{what} {_gib(size)}" for what, size, _ in _rows(plan)[1:])


def _rows(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    pages = f"{plan.num_pages} pages of {plan.page_size}: {plan.tokens:,} tokens in {plan.kv_dtype}"
    names = ("graphs", "logits", "penalty counts", "workspace", "drafts", "adapters")
    needs = zip(names, plan.needs.fixed, strict=True)
    states = (
        ("states of slots", plan.slots, plan.slot_bytes),
        ("state checkpoints", plan.checkpoints, plan.state_bytes),
    )
    return [
        ("free before loading", plan.available, ""),
        ("weights", plan.weights, f"in {plan.weight_dtype}"),
        *((what, size, "") for what, size in needs if size),
        ("KV pool", plan.pool, pages),
        *((what, number * each, f"{number:,}") for what, number, each in states if number),
        ("reserve" if any(plan.needs.fixed) else "left", plan.left, ""),
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 8 else f"{size / 2**20:.1f} MiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
