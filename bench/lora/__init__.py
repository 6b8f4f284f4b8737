"""Cost of LoRA adapters, against the same server without: `python -m bench.lora`."""
