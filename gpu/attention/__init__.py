"""Attention over pages: one protocol, one file per backend."""

from gpu.attention.base import AttentionBackend
from gpu.attention.torch_encoder import WholeAttention
from gpu.attention.torch_paged import TorchAttention

__all__ = ["AttentionBackend", "TorchAttention", "WholeAttention"]
