"""Attention on a GPU: which backend does which phase.

A step's decode rows and its chunks are attended by two backends, chosen apart, into one result. Imports
Triton.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from core.errors import ConfigError
from gpu.attention.backend import AttentionBackend, AttentionConfig, Cache, Phase, PhaseAttention
from gpu.attention.flashinfer_fa3 import FlashInferPrefill, compiled_prefill
from gpu.attention.flashinfer_xqa import FlashInferDecode
from gpu.attention.registry import AUTO, FLAG, parse_backends
from gpu.attention.triton_paged import TritonDecode, TritonPrefill
from gpu.kv.pool import KvPool
from gpu.state.view import StepView

BACKENDS: Mapping[tuple[Phase, str], Callable[[AttentionConfig], PhaseAttention]] = {
    ("prefill", "triton"): TritonPrefill,
    ("prefill", "flashinfer"): FlashInferPrefill,
    ("decode", "triton"): TritonDecode,
    ("decode", "flashinfer"): FlashInferDecode,
}
"""Each raises `ConfigError` with the reason where it cannot run."""

BEST: Mapping[Phase, tuple[str, ...]] = {"prefill": ("flashinfer", "triton"), "decode": ("triton",)}
"""The backends to try by phase, the quickest first. On an H200, 32 query and 8 KV heads of 128, TFLOP/s of
FA3 and of our prefill: 550 and 386 (2 x 4,096), 511 and 403 (1 x 8,192), 448 and 376 (4 x 2,048 behind
2,048), 371 and 238 (8 x 1,024). TB/s of XQA and of our decode: 3.66 and 4.13 (256 rows of 1,024 keys), 3.66
and 4.32 (64 of 8,192), 3.23 and 3.32 (32 of 1,024; with 4 KV heads 3.04 and 2.77, the one size of twelve
where it is ahead), and 328 and 78 us for a long row beside 63 short ones: `decode-xqa-h200.json`. For float8
pages 3.73 and 3.70, 3.41 and 3.99, 3.29 and 2.65, with errors of 0.036 and 0.0017, since XQA multiplies in
e4m3: `decode-xqa-fp8-h200.json`."""

AT_ONCE: Mapping[tuple[Phase, str], Callable[[AttentionConfig], PhaseAttention]] = {
    ("prefill", "flashinfer"): compiled_prefill,
}
"""Backends in place of those in `BACKENDS` where nothing was chosen by name, for those that might have to be
compiled first, for a minute or two. Each raises `ConfigError` instead."""

log = logging.getLogger(__name__)


@functools.cache
def _say(text: str) -> None:
    """Log `text` once for all ranks and replicas."""
    log.info("%s", text)


class PhasedAttention:
    """`AttentionBackend` of two backends. Owner: launch thread."""

    def __init__(self, prefill: PhaseAttention, decode: PhaseAttention) -> None:
        self._prefill = prefill
        self._decode = decode
        self._caches: list[Cache] = []

    @property
    def name(self) -> str:
        """See `AttentionBackend.name`."""
        return f"prefill={self._prefill.name},decode={self._decode.name}"

    def bind(self, pool: KvPool | None) -> None:
        """See `AttentionBackend.bind`."""
        self._caches = [] if pool is None else pool.caches()

    def plan(self, view: StepView) -> None:
        """See `AttentionBackend.plan`."""
        if view.max_decode:
            self._decode.plan(view)
        if view.max_chunks:
            self._prefill.plan(view)

    def attend(self, layer: int, q: Tensor, view: StepView, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        cache = self._caches[layer]
        out = q.new_empty(len(q), q.shape[1] * cache[1].shape[2])
        if view.max_decode:  # before the chunks, whose rows it may write
            self._decode.attend(layer, q, cache, view, out, sinks)
        if view.max_chunks:
            self._prefill.attend(layer, q, cache, view, out, sinks)
        return out


def choose(phase: Phase, name: str, config: AttentionConfig) -> PhaseAttention:
    """The backend of that name, or the first of `BEST` that is available. Raises `ConfigError` with the
    reason where none is."""
    if name == AUTO:
        *better, name = BEST[phase]
        for other in better:
            try:
                return AT_ONCE.get((phase, other), BACKENDS[phase, other])(config)
            except ConfigError as error:
                _say(f"{phase} attention is not {other}'s in this start: {error}")
    if (phase, name) not in BACKENDS:
        reason = "it is that of --device cpu" if name == "torch" else "there is no such backend"
        others = ", ".join(other for known, other in BACKENDS if known == phase)
        raise ConfigError(f"{FLAG} {phase}={name} is refused: {reason}. There is {others}.")
    try:
        return BACKENDS[phase, name](config)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {phase}={name} is refused: {error}") from error


def device_attention(config: AttentionConfig, backends: str = "") -> AttentionBackend:
    """Attention of a runner's steps by `backends`, as on the command line. Raises `ConfigError`."""
    names = parse_backends(backends)
    prefill, decode = (choose(phase, names[phase], config) for phase in ("prefill", "decode"))
    chosen = PhasedAttention(prefill, decode)
    _say(f"attention backends: {chosen.name}")
    return chosen
