"""Attention over pages: one protocol, one file per backend."""

from gpu.attention.base import AttentionBackend
from gpu.attention.torch_cpu import TorchAttention
from gpu.attention.whole import WholeAttention

__all__ = ["AttentionBackend", "TorchAttention", "WholeAttention"]
