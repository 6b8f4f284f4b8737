"""The kernels: checked against their twins and timed against the device's peaks.

`python -m bench.kernels.check_and_time` on a machine with a GPU does both and prints one table;
`python -m bench.kernels.tune` searches tile sizes; `python -m bench.kernels.compile` needs no GPU and
says what the compiler made of each kernel; `python -m bench.kernels.whole_step` needs none either and
compiles what the steps of a server launch.
"""
