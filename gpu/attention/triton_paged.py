"""Attention of captured steps by our own kernels (`gpu.kernels.attention`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu.attention.backend import AttentionFacts, AttentionOptions, Caches
from gpu.kernels.attention.cascade import Prefix, PrefixConfig, prefix_attention, prefix_config, prefix_space
from gpu.kernels.attention.decode import (
    DecodeConfig,
    DecodePlan,
    decode_config,
    decode_workspace,
    paged_decode,
    plan_decode,
)
from gpu.kernels.attention.merge_state import merge_state
from gpu.kernels.attention.pages import Pages
from gpu.kernels.attention.prefill import paged_prefill
from gpu.kernels.attention.prefill_merge import prefill_space
from gpu.kernels.attention.prefill_plan import (
    Chunks,
    PrefillConfig,
    PrefillPlan,
    plan_prefill,
    prefill_config,
)
from gpu.state.view import StepView

LEAST_CAPABILITY = (8, 0)
"""Copies into shared memory that run beside the arithmetic came with it, and bfloat16."""

INTERPRETER_PROCESSORS = 2
"""As if: without a GPU the kernels run in Triton's interpreter, in tests."""


def refusal(facts: AttentionFacts) -> str:
    """Why these kernels cannot do it; empty where they can."""
    if facts.page_size & (facts.page_size - 1):
        return f"pages of {facts.page_size} tokens are no power of two."
    if facts.head_dim > 256:
        return f"heads of {facts.head_dim} are wider than 256."
    if triton.knobs.runtime.interpret:
        return ""
    if facts.device.type != "cuda":
        return "it needs a GPU."
    capability = torch.cuda.get_device_capability(facts.device)
    if capability < LEAST_CAPABILITY:
        return "it needs compute capability {}.{}, this GPU has {}.{}.".format(*LEAST_CAPABILITY, *capability)
    return ""


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _has_room(device: torch.device) -> bool:
    """Whether a multiprocessor has the 228 KiB of shared memory that compute capability 9.0 brought."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _pages(facts: AttentionFacts, caches: Caches, layer: int, view: StepView) -> Pages:
    return Pages(
        *caches[layer], view.page_table, facts.page_size, facts.scale, facts.cap, facts.scales(layer)
    )


class TritonDecode:
    """`PhaseAttention` of decode rows. Owner: launch thread.

    In a graph that is `shared` the keys that all rows have in common are attended to once, in
    layers that see all positions: that many launches more, whether there are such keys or not.
    """

    def __init__(self, facts: AttentionFacts, options: AttentionOptions) -> None:
        heads, dim, device = facts.heads, facts.head_dim, facts.device
        self._facts, self._options = facts, options
        cuts = [self._cut(rows, few) for rows in (1, facts.max_rows) for few in (False, True)]
        most = max(cuts, key=lambda cut: cut.programs)
        self._space = decode_workspace(facts.max_rows, heads, facts.kv_heads, dim, most, device)
        self._caches: Caches = ()
        self._plans: dict[int, DecodePlan] = {}
        self._prefix: PrefixConfig = prefix_config(dim)
        self._shared: Prefix | None = None
        self._lse: Tensor | None = None
        if 0 < options.cascade_rows <= facts.max_rows and 0 in facts.windows:
            self._shared = prefix_space(facts.max_rows, heads, dim, self._prefix, device)
            self._lse = torch.empty(facts.max_rows, heads, dtype=torch.float32, device=device)

    def _cut(self, rows: int, few: bool) -> DecodeConfig:
        """How a graph of so many decode rows is cut, with `few` keys each or any number."""
        facts = self._facts
        deep = facts.dtype.itemsize <= 2 and _has_room(facts.device)
        processors, group = _processors(facts.device), facts.heads // facts.kv_heads
        return decode_config(
            facts.head_dim, facts.kv_heads, processors, rows, group=group, few=few, deep=deep
        )

    def bind(self, caches: Caches | None) -> None:
        """See `PhaseAttention.bind`."""
        self._caches = caches or ()

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: once for each window that layers have."""
        self._plans = {
            window: plan_decode(
                view.decode_slots,
                view.decode_lengths,
                self._cut(view.max_decode, self._cascades(window, view)),
                window=window,
                num_rows=view.num_decode,
                skip=view.common if self._cascades(window, view) else None,
                pdl=self._options.pdl,
            )
            for window in sorted(set(self._facts.windows))
        }

    def attend(self, layer: int, q: Tensor, view: StepView, out: Tensor) -> None:
        """See `PhaseAttention.attend`."""
        facts, rows = self._facts, view.max_decode
        window = facts.windows[layer]
        q, out = q[:rows], out[:rows]
        cascades = self._cascades(window, view)
        lse = self._lse[:rows] if cascades and self._lse is not None else None
        pages = _pages(facts, self._caches, layer, view)
        paged_decode(
            q,
            pages,
            self._plans[window],
            self._space,
            self._cut(rows, cascades),
            out=out,
            lse=lse,
            pdl=self._options.pdl,
        )
        if lse is not None:
            self._add_shared(pages, q, view, out.view(q.shape), lse)

    def _cascades(self, window: int, view: StepView) -> bool:
        """A window may begin behind what is shared: its layers go without."""
        return view.shared and window == 0 and self._shared is not None

    def _add_shared(self, pages: Pages, q: Tensor, view: StepView, out: Tensor, lse: Tensor) -> None:
        """Merge what the rows share into what they found in the rest."""
        assert self._shared is not None
        (rows, heads, dim), n = q.shape, self._prefix.parts * len(q)
        parts = self._shared.parts.view(-1, heads, dim)[:n].view(-1, rows, heads, dim)
        found = Prefix(parts, self._shared.lse.view(-1, heads)[:n].view(-1, rows, heads))
        prefix_attention(
            q,
            pages,
            view.decode_slots,
            view.common,
            self._prefix,
            num_rows=view.num_decode,
            found=found,
            pdl=self._options.pdl,
        )
        merge_state(out, lse, *found, num_rows=view.num_decode, pdl=self._options.pdl)


def chunks_of(view: StepView) -> Chunks:
    """The chunks of a step, as kernels take them."""
    return Chunks(view.chunk_slots, view.chunk_starts, view.chunk_firsts, view.counts[2:3])


class TritonPrefill:
    """`PhaseAttention` of chunks. Owner: launch thread.

    A `deep` graph cuts its chunks' keys too, where the step's blocks leave programs idle.
    """

    def __init__(self, facts: AttentionFacts, options: AttentionOptions) -> None:
        self._facts, self._options = facts, options
        self._config = prefill_config(facts.head_dim, facts.dtype, facts.kv_heads, _processors(facts.device))
        self._space = prefill_space(self._config, facts.kv_heads, facts.head_dim, facts.device)
        self._caches: Caches = ()
        self._plan: PrefillPlan | None = None

    def _cut(self, view: StepView) -> PrefillConfig:
        """How a graph's chunks are cut."""
        return self._config if view.deep else self._config._replace(programs=0)

    def bind(self, caches: Caches | None) -> None:
        """See `PhaseAttention.bind`."""
        self._caches = caches or ()

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: one list serves all layers, whatever their windows."""
        self._plan = plan_prefill(
            chunks_of(view),
            view.tokens,
            self._facts.heads // self._facts.kv_heads,
            self._cut(view),
            pdl=self._options.pdl,
        )

    def attend(self, layer: int, q: Tensor, view: StepView, out: Tensor) -> None:
        """See `PhaseAttention.attend`."""
        assert self._plan is not None, "plan() comes first"
        facts, config = self._facts, self._cut(view)
        paged_prefill(
            q,
            _pages(facts, self._caches, layer, view),
            self._plan,
            config,
            self._space if config.programs else None,
            window=facts.windows[layer],
            out=out,
            pdl=self._options.pdl,
        )
