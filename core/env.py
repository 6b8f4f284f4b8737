"""What the program reads of its surroundings: environment variables, and JSON files of models.

Other variables are read only if their name is `LOOM_` and that of a flag, as `LOOM_MAX_RUNNING`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelError

VARIABLES: Mapping[str, str] = {
    "LOOM_CACHE": "where fetched models and compiled kernels are kept; default: $XDG_CACHE_HOME/loom, "
    "or ~/.cache/loom",
    "XDG_CACHE_HOME": "the user's cache directory, when LOOM_CACHE is unset",
    "HF_HUB_OFFLINE": "1 means: never reach the network for a model (the same as --offline)",
    "FLASHINFER_DISABLE_JIT": "FlashInfer's: it compiles nothing",
    "MAX_JOBS": "FlashInfer's: how many compilers it runs at once",
    "WORLD_SIZE": "torchrun's, where --nnodes is not given: how many processes divide the ranks",
    "RANK": "torchrun's: which of them this is",
    "LOCAL_RANK": "torchrun's: which of those on this host, and so which GPUs it has",
    "MASTER_ADDR": "torchrun's: host of node 0",
    "MASTER_PORT": "torchrun's: port of the store where nodes find each other",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun's: True where torchrun itself holds that store",
    "TORCHELASTIC_RESTART_COUNT": "torchrun's: times that it has started the nodes again",
}


def read(name: str) -> str | None:
    """Value of a declared variable, or None when unset or empty."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in core/env.py")
    return os.environ.get(name) or None


PREFIX = "LOOM_"


def flag_variables() -> dict[str, str]:
    """Variables that may set flags, unless they are empty."""
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(PREFIX) and name not in VARIABLES and text
    }


SPINS = 3_000
"""Times that an idle OpenMP thread polls for work before it sleeps. libgomp's default of 300,000 takes CPU
time from other processes and from the thread that is waited for (`bench.cpu --loaded`). On two cores SmolLM2
in 4 bits makes 36 tokens/s beside one busy process, with 10,000 polls 28 and with 1,000 53; alone as many as
with 10,000, with 1,000 up to a fifth fewer (`bench/results/history/cpu-spins.json`)."""


def prepare_cpu_threads(threads: int, cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Set the OpenMP variables that torch reads when it is imported. `threads` 0: one thread per CPU of the
    process's affinity, at most the CPU quota of its cgroup. Keeps variables that the operator has set; only a
    `threads` other than 0 overrides OMP_NUM_THREADS."""
    quota, usable = cpu_quota(cgroup), _affinity()
    if threads:
        os.environ.pop("OMP_NUM_THREADS", None)
    if threads or quota < usable:
        _default("OMP_NUM_THREADS", str(threads or max(int(quota), 1)))
    if "OMP_WAIT_POLICY" not in os.environ:
        _default("GOMP_SPINCOUNT", str(SPINS))


def _affinity() -> int:
    # Not every system has affinities.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs of the process's affinity, at most the quota of its cgroup, at least 1."""
    return max(int(min(_affinity(), cpu_quota(cgroup))), 1)


def cpu_quota(cgroup: Path) -> float:
    """CPUs whose time a cgroup of version 2 may use; infinite without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return float("inf")


def load_cuda_modules_eagerly() -> None:
    """Have CUDA load its code at the start: a GPU that waits for another keeps a module from being loaded.
    Call before CUDA is used. A variable that is set stays."""
    _default("CUDA_MODULE_LOADING", "EAGER")


def use_interface(name: str) -> None:
    """Have NCCL connect and listen on this network interface alone, and not offer its state at another port.
    A variable that is set stays."""
    _default("NCCL_SOCKET_IFNAME", f"={name}")  # =: this very name, and not all that begin with it
    _default("NCCL_RAS_ENABLE", "0")


def _default(name: str, value: str) -> None:
    os.environ.setdefault(name, value)


def cache_dir() -> Path:
    """Directory for downloads. It is not created here."""
    if own := read("LOOM_CACHE"):
        return Path(own)
    base = read("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "loom"


def read_json(path: Path) -> Any:
    """Content of a file; None without it. Raises `ModelError` for what is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """An object from a file; None without it. Raises `ModelError` for anything else."""
    content = read_json(path)
    if content is not None and not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content
