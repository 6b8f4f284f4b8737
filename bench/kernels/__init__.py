"""The kernels: checked against plain-torch references and timed against the peaks of the device.

`python -m bench.kernels.check_and_time` does both on a GPU and prints one table; `python -m
bench.kernels.tune` searches tile sizes. Without a GPU, `python -m bench.kernels.compile` prints registers,
spills and instructions of each kernel, and `python -m bench.kernels.whole_step` compiles the kernels that a
server launches.
"""
