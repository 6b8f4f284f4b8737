"""Attacks on a running server by clients, signals and injected faults, and checks after each."""
