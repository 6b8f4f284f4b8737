"""Benchmarks. The product does not import this package."""
