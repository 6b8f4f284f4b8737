"""Compiles every kernel for sm_90 without a GPU and prints its resources: `python -m bench.kernels.compile`.

Registers, stack (spills), shared memory, and matrix instructions: HGMMA and, for FP8 and int8, QGMMA and
IGMMA are Hopper's, HMMA is the older one. Kernels with a stack and large-batch GEMMs without one of Hopper's
are slow.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.kernels.compile_attention import attention_cases
from bench.kernels.compile_moe import moe_cases
from bench.kernels.compile_products import product_cases
from bench.kernels.compile_steps import step_cases


class _Device:
    """A fake driver that only returns the target to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z]\w*)(\S*) +(.*?);")
_UNIFORM = re.compile(r"\bUR\d+\b")


def unwritten_registers(sass: str) -> list[str]:
    """Uniform registers that an instruction on uniform registers reads and none before it writes: ptxas has
    made such code, which gave a product a wild address."""
    written: set[str] = set()
    read: dict[str, None] = {}
    for operation, kind, operands in _INSTRUCTION.findall(sass):
        into, _, sources = operands.partition(",")
        if not operation.startswith("U"):
            # Moves and reductions to a uniform register name it alone; what else names one reads it.
            written |= set(_UNIFORM.findall(operands)) if "UR" in operation or "REDUX" in operation else set()
            continue
        read |= dict.fromkeys(each for each in _UNIFORM.findall(sources) if each not in written)
        own = _UNIFORM.findall(into)
        wide = 4 if "128" in kind else 2 if "64" in kind or "WIDE" in kind else 1
        written |= {f"UR{int(each[2:]) + more}" for each in own for more in range(wide)}
    return list(read)


def report(name: str, kernel: Any) -> str:
    """One line about a compiled kernel, from its SASS."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tools / "cuobjdump", *what, file.name], capture_output=True, text=True).stdout
            for what in (["-res-usage"], ["-sass"])
        )
    found = {key: int(m[1]) if (m := re.search(rf"{key}:(\d+)", usage)) else -1 for key in ("REG", "STACK")}
    instructions = {
        op: len(re.findall(rf"\b{op}\b", sass))
        for op in ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "LDL", "UTMALDG")
    }
    counts = " ".join(f"{op} {n}" for op, n in instructions.items() if n)
    if unwritten := unwritten_registers(sass):
        counts += f" READ, NOT WRITTEN: {' '.join(unwritten)}"
    return (
        f"{name:16} {kernel.metadata.name:14} warps {kernel.metadata.num_warps} REG {found['REG']:3} "
        f"STACK {found['STACK']:4} shared {kernel.metadata.shared:6} {counts}"
    )


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """A context in which every launch compiles for sm_90 into Triton's cache and does not run; yields the
    list of compiled kernels."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(run(self, *args, **kwargs | {"warmup": True}))

    driver.set_active(_Device())  # permanently: without a GPU there is no driver to restore
    with mock.patch.object(JITFunction, "run", compile_only):
        yield found


def main(argv: list[str] | None = None) -> int:
    """Compile the cases whose names begin with one of the arguments; without arguments, all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pdl", action="store_true")
    args = parser.parse_args(argv)
    cases: dict[str, Callable[[], Any]] = {}
    for kind in (product_cases, moe_cases, attention_cases, step_cases):
        cases |= kind(args.pdl)
    print(f"Triton {triton.__version__}")
    with compiling() as found:
        for name, case in cases.items():
            if args.names and not any(name.startswith(prefix) for prefix in args.names):
                continue
            found.clear()
            case()
            for kernel in found:
                print(report(name, kernel), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
