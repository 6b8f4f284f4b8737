"""The engine's loop: jobs in, steps planned and delivered, texts out."""
