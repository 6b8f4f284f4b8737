"""Choosing the next token: a pure function of logits, parameters, seed and position."""
