"""LoRA adapters: what is loaded, and how many fit where."""

from __future__ import annotations

import msgspec

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, those of experts included."""

HEAD = "lm_head"
TARGETS = (*LINEAR, "embed_tokens", HEAD)
"""Everything that an adapter may change."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter."""

    id: str
    """Unique for each load: one that is loaded again under the same name has another, and so other prefixes
    in the cache."""
    name: str
    path: str
    pinned: bool = False
    """Stays in host memory and on the device once it is there."""


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Room for adapters."""

    places: int
    """On the device: distinct adapters of running requests."""
    max_rank: int
    host: int
    """Adapters in host memory."""
    targets: tuple[str, ...] = LINEAR
    """Of `TARGETS`: an adapter with others is refused."""
