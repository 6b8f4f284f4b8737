"""Paged K/V tensors. Knows pages and offsets, neither slots nor requests."""

from __future__ import annotations

import math

import torch

from gpu.device import zeros
from gpu.kv.states import StatePool


class KvPool:
    """Keys and values of every page of every layer, in one allocation.

        data  [layers, num_pages, page_size, sides, kv_heads, head_dim]

    K and V of a token lie side by side, so that a step stores both with one indexed copy per layer
    and gathers both with one. Latents (MLA) have one side: a value is the first columns of its key.
    Page 0 is the dump.

    The memory starts as zeros, so that a page holds NaN only where one was computed.

    Owner: launch thread.
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        heads: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`heads` is (kv_heads, head_dim), or a `ModelSpec.kv_shape`."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._values = heads[2] if len(heads) > 2 else 0
        self.data = zeros((layers, num_pages, page_size, *_token(heads)), dtype, device)
        self.states: StatePool | None = None
        """States of linear attention, if layers have it: they come and go with the pages."""

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer K and V, strided views [num_pages * page_size, kv_heads, head_dim]; of latents V is a
        narrower view of K."""
        sides = [each.unbind(1) for each in self.data.flatten(1, 2).unbind(0)]
        return [(each[0], each[0][..., : self._values] if self._values else each[1]) for each in sides]

    def tokens(self) -> list[torch.Tensor]:
        """Per layer [num_pages * page_size, sides * kv_heads * head_dim]: a token's K, then its V."""
        return list(self.data.flatten(1, 2).flatten(2).unbind(0))

    def pages(self) -> list[torch.Tensor]:
        """Per layer [num_pages, page_size * sides * kv_heads * head_dim]: one row per page."""
        return list(self.data.flatten(2).unbind(0))

    @staticmethod
    def page_bytes(layers: int, page_size: int, heads: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of one page across all layers."""
        return layers * page_size * math.prod(_token(heads)) * dtype.itemsize


def _token(heads: tuple[int, ...]) -> tuple[int, int, int]:
    """Shape of a token's KV in a layer: (sides, kv_heads, head_dim)."""
    kv_heads, head_dim, *latent = heads
    return 1 if any(latent) else 2, kv_heads, head_dim
