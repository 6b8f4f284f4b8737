"""Attention of captured steps by our own kernels (`gpu.kernels.attention`)."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.attention.backend import AttentionConfig, Cache
from gpu.device import HOPPER
from gpu.kernels import cuda_kernel
from gpu.kernels.attention import cluster_decode
from gpu.kernels.attention.cascade import PrefixConfig, prefix_attention, prefix_config
from gpu.kernels.attention.cluster_decode import ClusterDecode
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig, latent_config, verify_config
from gpu.kernels.attention.decode_plan import DecodePlan, plan_decode
from gpu.kernels.attention.merge_state import merge_state
from gpu.kernels.attention.pages import Pages, latent_parts
from gpu.kernels.attention.prefill import paged_prefill
from gpu.kernels.attention.prefill_merge import prefill_space
from gpu.kernels.attention.prefill_plan import (
    Chunks,
    PrefillConfig,
    latent_prefill_config,
    plan_prefill,
    prefill_config,
)
from gpu.kernels.attention.split_kv import Partials, partials
from gpu.state.view import StepView

log = logging.getLogger(__name__)


def _check(config: AttentionConfig) -> None:
    """Raises `ConfigError` for pages and heads that these kernels cannot read."""
    if config.page_size & (config.page_size - 1):
        raise ConfigError(f"pages of {config.page_size} tokens are no power of two.")
    if config.values:
        tail = config.head_dim - config.values
        if config.values > 512 or tail > 64:
            raise ConfigError(f"latents of {config.values} + {tail} columns are wider than 512 + 64.")
    elif config.head_dim > 256:
        raise ConfigError(f"heads of {config.head_dim} are wider than 256.")


def _heads(config: AttentionConfig) -> tuple[int, int]:
    """KV heads as the kernels count them (`Shape.kv`), and columns of values."""
    return (
        (latent_parts(config.heads), config.values) if config.values else (config.kv_heads, config.head_dim)
    )


def _pages(config: AttentionConfig, cache: Cache, view: StepView, sinks: Tensor | None) -> Pages:
    scales = config.kv_scales or (1.0, 1.0)
    return Pages(*cache, view.page_table, config.page_size, config.scale, config.cap, scales, sinks)


def _cluster_decode(config: AttentionConfig) -> ClusterDecode | None:
    """Return the CUDA C++ kernel for few rows; None where it lacks support for the config, or was not
    measured."""
    shape = config.heads, config.kv_heads, config.head_dim, config.dtype
    plain = not config.values and not config.cap and config.kv_scales is None
    measured = config.pdl and config.gpu.capability == cluster_decode.CAPABILITY
    if not (plain and measured and cluster_decode.supported(*shape, config.page_size)):
        return None
    lacks = cuda_kernel.lack()
    if not lacks:
        try:
            return ClusterDecode(*shape, config.device)
        except RuntimeError as error:
            lacks = str(error)
    log.warning("Attention of few rows takes up to 2 us a layer longer: %s", lacks)
    return None


class TritonDecode:
    """`PhaseAttention` of decode rows. Owner: launch thread.

    In a graph that is `shared` the keys that all rows have in common are attended to once, in
    layers that see all positions: that many launches more, whether there are such keys or not.

    Graphs of few rows use `ClusterDecode`, which needs no plan.
    """

    name = "triton"

    def __init__(self, config: AttentionConfig) -> None:
        _check(config)
        heads, device = config.heads, config.device
        self._kv, dim = _heads(config)
        self._config = config
        cuts = [
            self._cut(rows, few, query)
            for rows in (1, config.max_rows)
            for few in (False, True)
            for query in {1, config.query}
        ]
        most = max(cuts, key=lambda cut: cut.programs * cut.queries)
        self._space = decode_workspace(config.max_rows, heads, self._kv, dim, most, device)
        self._plans: dict[int, DecodePlan] = {}
        self._clusters = _cluster_decode(config)
        self._prefix: PrefixConfig = prefix_config(dim)
        self._shared: Partials | None = None
        self._lse: Tensor | None = None
        cascades = 0 < config.cascade_rows <= config.max_rows and not config.values
        if cascades and 0 in config.windows:
            shape = self._prefix.parts, config.max_rows, heads
            self._shared = partials(*shape, head_dim=dim, device=device)
            self._lse = torch.empty(config.max_rows, heads, dtype=torch.float32, device=device)

    def _cut(self, tokens: int, few: bool, query: int) -> DecodeConfig:
        """How a graph of so many tokens of decode rows is cut, up to `query` of a row, with `few` keys each
        or any number."""
        config = self._config
        if config.values:
            return latent_config(self._kv, config.gpu.processors, config.dtype.itemsize)
        deep = config.dtype.itemsize <= 2 and config.gpu.capability >= HOPPER
        processors, group = config.gpu.processors, config.heads // config.kv_heads
        return verify_config(
            config.head_dim,
            config.kv_heads,
            processors,
            tokens,
            query,
            group=group,
            few=few,
            deep=deep,
            coarse=config.kv_scales is not None,
        )

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: once for each window that layers have."""
        if self._few(view) is not None:
            return
        self._plans = {
            window: plan_decode(
                view.decode_slots,
                view.decode_lengths,
                self._cut(view.max_decode, self._cascades(window, view), view.query),
                longest=view.query,
                window=window,
                num_rows=view.num_decode,
                skip=view.common if self._cascades(window, view) else None,
                ancestors=view.ancestors,
                pdl=self._config.pdl,
            )
            for window in sorted(set(self._config.windows))
        }

    def attend(
        self, layer: int, q: Tensor, cache: Cache, view: StepView, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """See `PhaseAttention.attend`."""
        rows, window = view.max_decode, self._config.windows[layer]
        q, out = q[:rows], out[:rows]
        pages, few = _pages(self._config, cache, view, sinks), self._few(view)
        if few is not None:
            few(
                q,
                pages,
                view.decode_slots,
                view.decode_lengths,
                view.num_decode,
                out=out,
                window=window,
                newest=rows,  # all tokens may be one row's: a draft model's block
                pdl=self._config.pdl,
            )
            return
        cascades = self._cascades(window, view)
        lse = self._lse[:rows] if cascades and self._lse is not None else None
        paged_decode(
            q,
            # The result of a part of the keys has no sink in it, which would count once for each part.
            pages if lse is None else pages._replace(sinks=None),
            self._plans[window],
            self._space,
            self._cut(rows, cascades, view.query),
            window=window,
            out=out,
            lse=lse,
            ancestors=view.ancestors,
            pdl=self._config.pdl,
        )
        if lse is not None:
            self._add_shared(pages, q, view, out.view(q.shape), lse)

    def _few(self, view: StepView) -> ClusterDecode | None:
        """Return the CUDA C++ kernel if it serves this graph."""
        clusters = self._clusters
        if clusters is None or view.shared or view.ancestors is not None:
            return None
        return clusters if clusters.takes(view.max_decode, view.deep) else None

    def _cascades(self, window: int, view: StepView) -> bool:
        """A window may begin behind what is shared: its layers go without."""
        return view.shared and window == 0 and self._shared is not None

    def _add_shared(self, pages: Pages, q: Tensor, view: StepView, out: Tensor, lse: Tensor) -> None:
        """Merge what the rows share into what they found in the rest."""
        assert self._shared is not None
        (rows, heads, dim), n = q.shape, self._prefix.parts * len(q)
        parts = self._shared.out.view(-1, heads, dim)[:n].view(-1, rows, heads, dim)
        found = Partials(parts, self._shared.lse.view(-1, heads)[:n].view(-1, rows, heads))
        prefix_attention(
            q,
            pages,
            view.decode_slots,
            view.common,
            self._prefix,
            num_rows=view.num_decode,
            found=found,
            pdl=self._config.pdl,
        )
        merge_state(out, lse, *found, sinks=pages.sinks, num_rows=view.num_decode, pdl=self._config.pdl)


def chunks_of(view: StepView) -> Chunks:
    """The chunks of a step, as kernels take them."""
    return Chunks(view.chunk_slots, view.chunk_starts, view.chunk_firsts, view.counts[2:3])


class TritonPrefill:
    """`PhaseAttention` of chunks. Owner: launch thread.

    A `deep` graph cuts its chunks' keys too, where the step's blocks leave programs idle.
    """

    name = "triton"

    def __init__(self, config: AttentionConfig) -> None:
        _check(config)
        self._config = config
        (self._kv, dim), processors = _heads(config), config.gpu.processors
        if config.values:
            self._split = latent_prefill_config(self._kv, processors, config.dtype.itemsize)
        else:
            self._split = prefill_config(dim, config.dtype, self._kv, processors)
        self._space = prefill_space(self._split, self._kv, dim, config.device)
        self._items: Tensor | None = None

    def _cut(self, view: StepView) -> PrefillConfig:
        """How a graph's chunks are cut."""
        return self._split if view.deep else self._split._replace(programs=0)

    def plan(self, view: StepView, chunks: Chunks | None = None) -> None:
        """See `PhaseAttention.plan`: one list serves all layers, whatever their windows. `chunks`, if given,
        replace the chunks of the step."""
        self._items = plan_prefill(
            chunks_of(view) if chunks is None else chunks,
            view.tokens,
            self._config.heads // self._kv,
            self._cut(view),
            pdl=self._config.pdl,
        )

    def attend(
        self, layer: int, q: Tensor, cache: Cache, view: StepView, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """See `PhaseAttention.attend`."""
        assert self._items is not None, "plan() comes first"
        cut = self._cut(view)
        paged_prefill(
            q,
            _pages(self._config, cache, view, sinks),
            self._items,
            cut,
            self._space if cut.programs else None,
            window=self._config.windows[layer],
            out=out,
            pdl=self._config.pdl,
        )
