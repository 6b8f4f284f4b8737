"""Benches of `core` units: no device, no sockets."""
