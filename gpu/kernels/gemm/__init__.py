"""Matrix products: of few rows, of up to 64, and of FP8 weights."""
