"""What LoRA adapters cost, against the same server without: `python -m bench.lora`."""
