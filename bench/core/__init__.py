"""Benchmarks of `core` without a device or sockets."""
