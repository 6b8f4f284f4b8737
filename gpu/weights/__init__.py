"""Checkpoints: what is in the files, and every parameter filled exactly once."""

from gpu.weights.gguf import config_from_gguf
from gpu.weights.load import load_model

__all__ = ["config_from_gguf", "load_model"]
