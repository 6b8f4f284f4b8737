"""Trains draft heads, EAGLE-3 and DFlash, from a model's own answers."""
