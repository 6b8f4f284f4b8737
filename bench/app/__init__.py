"""Benchmarks of HTTP, delivery and the step threads together, with a simulated device."""
