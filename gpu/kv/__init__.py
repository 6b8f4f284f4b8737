"""Paged storage of keys and values."""
