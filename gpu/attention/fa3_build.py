"""Whether FlashInfer's FA3 is compiled for a model, and a process that compiles it for the next start.

nvcc takes one to two minutes. A start that chooses its backends itself does not wait: Triton's prefill
serves, and FA3 is compiled beside the server. The process finishes when the server ends first, unless what
ends the server ends all of its control group, as systemd and containers do: what it has compiled stays. A
running server keeps its backend.

Written against FlashInfer 0.6.13, whose libraries are built by ninja, under a lock by flock.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch

from core.clock import monotonic
from core.env import read, usable_cpus
from core.errors import ConfigError
from gpu.attention.backend import AttentionConfig
from gpu.memory import available_bytes

log = logging.getLogger(__name__)

SHARE = 2
"""CPUs for each compiler. The event loop, a rank's two threads and, during the start, Triton's compiler have
the others to themselves: at nice 19 a compiler still delays what wakes up on its CPU."""

UNIT_BYTES = 4 * 2**30
"""Memory of a compiler: for one of the ten units of heads of 128 nvcc 13.0 took 3.5 GiB and 60 s of a CPU."""

LOWLY = 'echo 1000 > /proc/$$/oom_score_adj; exec nice -n 19 timeout 3600 "$@"'
"""How the compilers run: where memory runs out they are ended before the server, and one that hangs does not
hold FlashInfer's lock for ever. By a shell, so that all of it holds before the first compiler begins."""

ASKED_SECONDS = 30.0
"""How long ninja may take to say whether there is work: it reads the times of some thousand files."""

_ASKING = threading.Lock()
"""Ranks ask one after the other, so that all get the first one's answer."""

OUTPUT = "loom-compile.log"
"""Name of the file with the compilers' output, in the folder of the library."""


def module_args(config: AttentionConfig, windowed: bool) -> tuple[Any, ...]:
    """Return the arguments of FlashInfer's prefill module that follow the backend's name."""
    dim, dtype = config.head_dim, config.dtype
    return (dtype, dtype, dtype, torch.int32, dim, dim, 0, windowed, config.cap > 0, False)


def module_spec(*args: Any) -> Any:
    """Return FlashInfer's `JitSpec` of FA3 for `module_args`; its sources are written. Raises `OSError` (the
    cache cannot be written) and `RuntimeError` (no compute capability)."""
    from flashinfer.prefill import gen_batch_prefill_module

    return gen_batch_prefill_module("fa3", *args)


def is_built(spec: Any) -> bool:
    """Return whether FlashInfer loads the library without compiling. Raises `OSError` without ninja.

    FlashInfer's `is_compiled` says only that there is one. Each load runs ninja, which compiles again where a
    header is newer, as after the package is installed anew, or a flag is another: so ninja is asked.
    """
    if spec.is_aot:
        return True
    if not spec.is_compiled:
        return False
    try:
        asked = subprocess.run(
            (*_ninja(spec), "-n"), capture_output=True, text=True, check=False, timeout=ASKED_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0 and "no work to do" in asked.stdout


def require_built(config: AttentionConfig) -> None:
    """Raise `ConfigError` unless FA3 is compiled for this model; it is being compiled then, where
    that is possible. All ranks and replicas of a process get the same answer, whenever they ask."""
    kinds = sorted({window > 0 for window in config.windows})
    with _ASKING:
        lacks = [_lack(module_args(config, windowed), len(kinds)) for windowed in kinds]
    for lack in lacks:
        if lack:
            raise ConfigError(lack)


@functools.cache
def _lack(args: tuple[Any, ...], kinds: int) -> str:
    """Why FA3 cannot be loaded at once, empty where it can; begins to compile it, as one of several `kinds`
    that a model needs."""
    try:
        spec = module_spec(*args)
        return "" if spec.is_aot else _lack_in_cache(spec, kinds)
    except (OSError, RuntimeError) as error:
        return f"FlashInfer cannot make FA3 ready: {error}"


def _lack_in_cache(spec: Any, kinds: int) -> str:
    if read("FLASHINFER_DISABLE_JIT"):
        return "FA3 is not in flashinfer-jit-cache, and FLASHINFER_DISABLE_JIT is set."
    if shutil.which("ninja") is None:
        return "FlashInfer needs ninja for FA3, which is not in PATH: pip install ninja."
    with open(spec.lock_path, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # whoever holds it compiles the library, or loads it
            return "" if is_built(spec) else "Another process is compiling FA3 for this model."
        spec.write_ninja()
        if is_built(spec):
            return ""
        nvcc = spec.get_compile_commands()[0]["command"].split()[0]
        if shutil.which(nvcc) is None:
            return f"FA3 is not compiled for this model, and there is no {nvcc}: install CUDA's compiler."
        jobs = _jobs(kinds)
        output = _compile(spec, jobs, lock.fileno())
    return (
        "FA3 is not compiled for this model yet. It is being compiled beside this server, for the next start "
        f"(ninja -j {jobs}, nice 19); the output goes to {output}."
    )


def _jobs(kinds: int) -> int:
    most = read("MAX_JOBS") or ""
    found = min(usable_cpus() // SHARE, available_bytes() // UNIT_BYTES) // kinds
    return max(min(found, int(most)) if most.isdigit() else found, 1)


def _compile(spec: Any, jobs: int, lock: int) -> Path:
    """Start the compilers and return the path of their output. The process holds the lock until the last
    compiler ends."""
    command = ("sh", "-c", LOWLY, "sh", *_ninja(spec), "-j", str(jobs))
    output = Path(spec.build_dir, OUTPUT)
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            # Signals of a terminal do not reach it. No session of its own: where the kernel groups tasks by
            # session, one group has as much time as another, whatever the niceness within.
            process_group=0,
        )
    threading.Thread(target=_tell, args=(process, output), name="loom-fa3", daemon=True).start()
    return output


def _tell(process: subprocess.Popen[bytes], output: Path) -> None:
    began = monotonic()
    if code := process.wait():
        log.warning("FA3 was not compiled (exit code %d): see %s. Triton's prefill serves.", code, output)
    else:
        log.info("FA3 is compiled, in %.0f s: the next start uses it", monotonic() - began)


def _ninja(spec: Any) -> tuple[str, ...]:
    return ("ninja", "-C", str(spec.build_dir), "-f", str(spec.ninja_path))
