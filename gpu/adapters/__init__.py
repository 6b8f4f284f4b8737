"""LoRA adapters of a base model: read, kept on the host, copied to the device, applied row by row."""
