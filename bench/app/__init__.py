"""Benches of the loop: HTTP, delivery and the step threads together, with a device that is not there."""
