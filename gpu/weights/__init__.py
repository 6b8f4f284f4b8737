"""Loading of safetensors, GGUF and random weights into a model."""

from gpu.weights.draft import check_layer, load_draft
from gpu.weights.gguf import config_from_gguf
from gpu.weights.load import load_model

__all__ = ["check_layer", "config_from_gguf", "load_draft", "load_model"]
