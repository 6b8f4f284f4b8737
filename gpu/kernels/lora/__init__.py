"""LoRA: the delta B A x of each row's adapter, for a batch whose rows have different ones."""
