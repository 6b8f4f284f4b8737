"""Formats of quantised weights, and their products in plain torch. `gpu.weight_formats` chooses one."""
