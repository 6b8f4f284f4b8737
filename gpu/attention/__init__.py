"""Attention over pages: one protocol, one file per backend."""

from gpu.attention.backend import AttentionBackend, TorchBackend
from gpu.attention.torch_encoder import EncoderAttention
from gpu.attention.torch_paged import TorchAttention, torch_attention

__all__ = ["AttentionBackend", "EncoderAttention", "TorchAttention", "TorchBackend", "torch_attention"]
