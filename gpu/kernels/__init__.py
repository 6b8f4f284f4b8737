"""Triton kernels and their launchers, one operation per file; `bench/kernels/reference.py` has them in torch.

A launcher allocates its results (from the graph's pool while one is captured), reads nothing back from
the device and chooses no grid from device data, so one captured graph serves any lengths, any routing
and any number of true rows. Kernels are not wired to layers here: shapes, dtypes and rounding are each
launcher's docstring, and needing nothing but torch and triton they can be tried on a bare GPU machine
(`bench.kernels.check_and_time`).
"""
