"""Which attention backend does which phase.

A step's decode rows and its chunks are attended by two backends, chosen apart, into one result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import get_args

import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.attention.backend import (
    AttentionBackend,
    AttentionFacts,
    AttentionOptions,
    Phase,
    PhaseAttention,
)
from gpu.kv.pool import KvPool
from gpu.state.view import StepView


class PhasedAttention:
    """`AttentionBackend` of two backends. Owner: launch thread."""

    def __init__(self, prefill: PhaseAttention, decode: PhaseAttention) -> None:
        self._prefill = prefill
        self._decode = decode

    def bind(self, pool: KvPool | None) -> None:
        """See `AttentionBackend.bind`."""
        caches = None if pool is None else pool.caches()
        self._prefill.bind(caches)
        self._decode.bind(caches)

    def plan(self, view: StepView) -> None:
        """See `AttentionBackend.plan`."""
        if view.max_decode:
            self._decode.plan(view)
        if view.max_chunks:
            self._prefill.plan(view)

    def attend(self, layer: int, q: Tensor, view: StepView) -> Tensor:
        """See `AttentionBackend.attend`."""
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if view.max_decode:  # before the chunks, whose rows it may write
            self._decode.attend(layer, q, view, out)
        if view.max_chunks:
            self._prefill.attend(layer, q, view, out)
        return out


Maker = Callable[[Phase, AttentionFacts, AttentionOptions], PhaseAttention]


def _triton(phase: Phase, facts: AttentionFacts, options: AttentionOptions) -> PhaseAttention:
    """Our own kernels. Raises `ConfigError` where they cannot run."""
    if find_spec("triton") is None:
        raise ConfigError("triton is not installed: pip install 'loom-serve[cuda]'.")
    from gpu.attention.triton_paged import TritonDecode, TritonPrefill, refusal

    if reason := refusal(facts):
        raise ConfigError(reason)
    if phase == "prefill":
        return TritonPrefill(facts, options)
    return TritonDecode(facts, options)


def _fa3(phase: Phase, facts: AttentionFacts, options: AttentionOptions) -> PhaseAttention:
    """FlashInfer's prefill. Raises `ConfigError` where it cannot run."""
    from gpu.attention.flashinfer_fa3 import FlashInferPrefill, refusal

    if reason := refusal(facts):
        raise ConfigError(reason)
    return FlashInferPrefill(facts, options)


def _xqa(phase: Phase, facts: AttentionFacts, options: AttentionOptions) -> PhaseAttention:
    """FlashInfer's decode. Raises `ConfigError` where it cannot run."""
    from gpu.attention.flashinfer_xqa import FlashInferDecode, refusal

    if reason := refusal(facts):
        raise ConfigError(reason)
    return FlashInferDecode(facts, options)


BACKENDS: Mapping[tuple[Phase, str], Maker] = {
    ("prefill", "triton"): _triton,
    ("prefill", "flashinfer"): _fa3,
    ("decode", "triton"): _triton,
    ("decode", "flashinfer"): _xqa,
}

AUTO = "auto"

BEST: Mapping[Phase, tuple[str, ...]] = {"prefill": ("flashinfer", "triton"), "decode": ("triton",)}
"""By phase the backends to try, the quickest first. On an H200, 32 query and 8 KV heads of 128, TFLOP/s of
FA3 and of our prefill: 550 and 386 (2 x 4,096), 511 and 403 (1 x 8,192), 448 and 376 (4 x 2,048 behind
2,048), 371 and 238 (8 x 1,024). TB/s of XQA and of our decode: 3.66 and 4.13 (256 rows of 1,024 keys), 3.66
and 4.32 (64 of 8,192), 3.23 and 3.32 (32 of 1,024; with 4 KV heads 3.04 and 2.77, the one size of twelve
where it is ahead), and 328 and 78 us for a long row beside 63 short ones: `decode-xqa-h200.json`."""

KNOWN: Mapping[tuple[Phase, str], str] = {
    ("prefill", "torch"): "it is that of --device cpu.",
    ("decode", "torch"): "it is that of --device cpu.",
}
"""Names that people try, and why they are unavailable on a GPU."""

FLAG = "--attention-backend"

log = logging.getLogger(__name__)


def parse_backends(text: str, default: str = AUTO) -> dict[Phase, str]:
    """`prefill=NAME,decode=NAME`, either alone, or one NAME for both; what is not named is `default`.

    Raises `ConfigError`.
    """
    found: dict[Phase, str] = dict.fromkeys(get_args(Phase), default)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and "=" not in parts[0]:
        return dict.fromkeys(get_args(Phase), parts[0])
    for part in parts:
        name, _, backend = part.partition("=")
        phase = next((phase for phase in found if phase == name.strip()), None)
        if phase is None or not backend.strip():
            raise ConfigError(f"{FLAG} takes prefill=NAME,decode=NAME, got {text!r}.")
        found[phase] = backend.strip()
    return found


def check_cpu_backends(text: str) -> None:
    """Raises `ConfigError` for anything but torch: a CPU has no other."""
    for phase, name in parse_backends(text, "torch").items():
        if name != "torch":
            raise ConfigError(f"{FLAG} {phase}={name} needs a GPU: on a CPU there is torch alone.")


def choose(phase: Phase, name: str, facts: AttentionFacts, options: AttentionOptions) -> PhaseAttention:
    """The backend of that name, or the first of `BEST` that is available. Raises `ConfigError` with the
    reason where none is."""
    if name == AUTO:
        *better, last = BEST[phase]
        for other in better:
            try:
                return choose(phase, other, facts, options)
            except ConfigError as error:
                log.info("%s", error)
        name = last
    if (phase, name) not in BACKENDS:
        reason = KNOWN.get((phase, name), "there is no such backend.")
        others = ", ".join(other for known, other in BACKENDS if known == phase)
        raise ConfigError(f"{FLAG} {phase}={name} is refused: {reason} There is {others}.")
    try:
        return BACKENDS[phase, name](phase, facts, options)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {phase}={name} is refused: {error}") from error


def device_attention(
    facts: AttentionFacts, options: AttentionOptions, backends: str = ""
) -> AttentionBackend:
    """What the steps of a runner attend with, `backends` as on the command line. Raises `ConfigError`."""
    names = parse_backends(backends)
    prefill, decode = (choose(phase, names[phase], facts, options) for phase in ("prefill", "decode"))
    return PhasedAttention(prefill, decode)
