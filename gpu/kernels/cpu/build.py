"""Compiles `step.c` on the machine that runs it, once, as Triton does with what a GPU needs.

Where gcc is missing, or the CPU has no AVX2, torch runs the step, and FBGEMM or oneDNN multiplies weights of
8 bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from core.clock import monotonic
from core.env import cache_dir

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step.c")

COMPILERS = ("gcc", "cc")
"""Not clang: its OpenMP is another library, with threads beside torch's."""

FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")

SECONDS = 120.0
"""How long a compiler may take: it needs two."""


def library() -> ctypes.CDLL | None:
    """The functions of `step.c`; None where `lack` says why."""
    return _find()[0]


def lack() -> str:
    """Return the reason why this machine has no kernels, for the operator; empty if it has them."""
    return _find()[1]


@cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    if not torch.cpu._is_avx2_supported():
        return None, "kernels for x86 CPUs with AVX2 alone"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        lacks = "no C compiler: with gcc, steps on this CPU take about half the time"
        log.info("%s", lacks)
        return None, lacks
    try:
        return _load(compiler), ""
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or ""
        lacks = f"{compiler} cannot make the CPU's kernels, torch serves without them: {error} {output}"
        log.warning("%s", lacks)
        return None, lacks


def _load(compiler: str) -> ctypes.CDLL:
    """The library of this machine's cache, compiled if it is not there."""
    threads = _openmp()
    command = [compiler, *FLAGS, str(SOURCE)]
    if threads is not None:
        command += ["-fopenmp", str(threads)]
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS
    ).stdout
    name = hashlib.sha256(
        "\n".join([*command, version, _features(), SOURCE.read_text()]).encode()
    ).hexdigest()
    try:
        folder = cache_dir() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"cpu-{name[:32]}.so"
        if not path.exists():
            _compile(command, path)
        return ctypes.CDLL(str(path))
    except PermissionError:  # a cache that cannot be written, as in a container: for this process alone
        with tempfile.TemporaryDirectory() as own:
            path = Path(own, "cpu.so")
            _compile(command, path)
            return ctypes.CDLL(str(path))


def _compile(command: list[str], path: Path) -> None:
    """Write the library to `path`, which others may read or write meanwhile."""
    began = monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        made = Path(own, path.name)
        subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=True, timeout=SECONDS
        )
        os.replace(made, path)
    log.info("The CPU's kernels are compiled, in %.1f s", monotonic() - began)


def _openmp() -> Path | None:
    """The OpenMP library that torch has loaded, whose threads the kernels share; None: they have one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = (Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "libgomp" in line)
    return next(found, None)


def _features() -> str:
    """Return the CPU features that `-march=native` compiles for. Other machines may share the cache."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))
