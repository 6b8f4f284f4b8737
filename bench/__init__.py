"""Measures. Nothing imports this package."""
