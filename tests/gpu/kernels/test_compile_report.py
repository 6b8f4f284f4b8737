"""Findings of `bench.kernels.compile` in machine code."""

from __future__ import annotations

from bench.kernels.compile import unwritten_registers

MOVED = """
        /*0040*/                   ULDC.64 UR8, c[0x0][0x230] ;      /* 0x00008c0000087ab9 */
        /*0050*/                   R2UR P0, UR4, R6 ;
        /*0060*/                   ULEA UR6, UP0, UR9, UR8, 0x2 ;
        /*0070*/              @!P6 UIADD3 UR5, UP0, UR4, 0x2, URZ ;
        /*0080*/                   LDG.E.128 R88, desc[UR28][R122.64] ;
"""


def test_a_uniform_register_that_nothing_wrote_is_named() -> None:
    assert unwritten_registers(MOVED) == []
    wild = MOVED + "        /*1540*/                   UIADD3 UR8, UP0, UR14, 0x2, URZ ;"
    assert unwritten_registers(wild) == ["UR14"]
