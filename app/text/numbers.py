"""Numbers in JSON that are slow to parse."""

from __future__ import annotations

MAX_SLOW = 10_000
"""Numbers with an exponent of three digits in one body: each takes msgspec 6 µs, a hundred times what others
take, and 8 MB of them took 14 s."""

FEW_SLOW = 100
"""Slow numbers that are read on the loop, in 0.6 ms at most; a hexadecimal id often looks like one."""

_PLAIN = bytes.maketrans(b"123456789E+", b"000000000e-")
_SLOW = (b"e000", b"e-000")


def slow_numbers(body: bytes) -> int:
    """An upper bound of the numbers that are slow to parse: text that looks like them counts too. Takes 1 ns
    a byte."""
    plain = body.translate(_PLAIN)
    return sum(plain.count(each) for each in _SLOW)
