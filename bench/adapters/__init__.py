"""Trains LoRA adapters on the reference answers of public sets."""
