"""A stand-in for the parts of FlashInfer that Loom compiles FA3 with: one unit, compiled by a script."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

from tests.rigs.wait import PATIENCE

NVCC = """#!/bin/sh
echo $$ >> {folder}/units
read verdict < {folder}/gate
if [ "$verdict" = fine ]; then cp "$1" "$2"; else echo "nvcc error: $verdict"; exit 1; fi
"""


class Library:
    """FlashInfer's `JitSpec` in `folder`, built by ninja from a source and a header of a package.

    Its compiler writes its number to `units`, then waits at `gate` for a word: `fine`, or what is wrong.
    """

    flags = "-O3"

    def __init__(self, folder: Path) -> None:
        self.folder, self.build_dir = folder, folder / "cached_ops"
        self.ninja_path, self.lock_path = self.build_dir / "build.ninja", folder / "fa3.lock"
        self.library, self.nvcc = self.build_dir / "fa3.so", folder / "nvcc"
        self.header, self.units = folder / "prefill.cuh", folder / "units"

    def lay_out(self) -> None:
        """Make the package and the compiler."""
        for path in (self.header, self.folder / "prefill.cu", self.units):
            path.touch()
        self.nvcc.write_text(NVCC.format(folder=self.folder))
        self.nvcc.chmod(self.nvcc.stat().st_mode | stat.S_IXUSR)
        os.mkfifo(self.folder / "gate")

    @property
    def is_aot(self) -> bool:
        """Whether flashinfer-jit-cache has it."""
        return (self.folder / "aot.so").exists()

    @property
    def is_compiled(self) -> bool:
        """Whether the library exists."""
        return self.is_aot or self.library.exists()

    def write_ninja(self) -> None:
        """Write build.ninja."""
        self.build_dir.mkdir(exist_ok=True)
        rule = f"rule nvcc\n  command = {self.nvcc} $in $out {self.flags}\n"
        self.ninja_path.write_text(
            f"{rule}build {self.library}: nvcc {self.folder}/prefill.cu | {self.header}\n"
        )

    def get_compile_commands(self) -> list[dict[str, str]]:
        """Return the command of each compilation unit."""
        return [{"command": f"{self.nvcc} -c prefill.cu"}]

    def stop(self) -> None:
        """End a compiler that still waits."""
        with contextlib.suppress(OSError), self._gate() as gate:  # none waits
            gate.write(b"the test has ended\n")

    def answer(self, verdict: str, look: Callable[[int], None] = lambda process: None) -> None:
        """Wait until the compiler waits, `look` at that process, then let it end."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                gate = self._gate()
                break
            except OSError:
                assert time.monotonic() < deadline, "no compiler began"
                time.sleep(0.001)
        with gate:
            look(int(self.units.read_text().split()[-1]))
            gate.write(f"{verdict}\n".encode())

    def _gate(self) -> BinaryIO:
        """Raises `OSError` while no compiler waits."""
        return os.fdopen(os.open(self.folder / "gate", os.O_WRONLY | os.O_NONBLOCK), "wb")


def modules(library: Library, loaded: Any = None) -> Mapping[str, ModuleType]:
    """FlashInfer, by the names of its modules: its library is `library`, and `loaded` when it is loaded."""
    prefill: Any = ModuleType("flashinfer.prefill")
    prefill.gen_batch_prefill_module = lambda *args: library
    prefill.get_batch_prefill_module = lambda *args: loaded or SimpleNamespace()
    return {"flashinfer": ModuleType("flashinfer"), "flashinfer.prefill": prefill}
