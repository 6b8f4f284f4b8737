"""A start that finds FA3 not compiled: what serves, what compiles it, and what is said of it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ConfigError
from gpu.attention import fa3_build, selector
from gpu.attention.backend import AttentionConfig
from gpu.attention.selector import device_attention
from gpu.device import CudaFacts
from tests.rigs.flashinfer import Library, modules
from tests.rigs.tree import ROOT
from tests.rigs.wait import PATIENCE

HOPPER = CudaFacts("", "NVIDIA H200", (9, 0), 132)
CONFIG = AttentionConfig(4, 2, 64, (0,), 16, 8, torch.bfloat16, torch.device("cpu"), HOPPER, 0.1)
TRITON, FLASHINFER = "prefill=triton,decode=triton", "prefill=flashinfer,decode=triton"

pytestmark = pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")


@pytest.fixture
def library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Library]:
    made = Library(tmp_path)
    made.lay_out()
    for name, module in modules(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("gpu.attention.flashinfer_fa3.find_spec", lambda name: name)
    for name in ("MAX_JOBS", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, "gpu.attention")
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    """Start each test with empty caches."""
    another_start()
    yield
    another_start()


def another_start() -> None:
    """Clear the caches, as a new process has none."""
    fa3_build._lack.cache_clear()
    selector._say.cache_clear()


def ended() -> None:
    """Wait until the end of the compilers has been logged."""
    for thread in threading.enumerate():
        if thread.name == "loom-fa3":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def serves(backends: str = "", config: AttentionConfig = CONFIG) -> str:
    return device_attention(config, backends).name


def compiled(library: Library) -> None:
    """Compile FA3, as an earlier server did."""
    assert serves() == TRITON
    library.answer("fine")
    ended()
    another_start()


def test_triton_serves_while_fa3_is_compiled_for_the_next_start(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for every other rank and replica, and when it has ended: nothing changes while a server runs."""
    with socket.socket() as listener:
        listener.set_inheritable(True)
        assert [serves() for rank in range(3)] == [TRITON] * 3
    output = library.build_dir / "loom-compile.log"
    reason, chosen = caplog.messages
    assert "FA3 is not compiled for this model yet. It is being compiled beside this server" in reason
    assert reason.endswith(f"the output goes to {output}.")
    assert chosen == f"attention backends: {TRITON}"

    def look(process: int) -> None:
        ninja = int(Path(f"/proc/{os.getpgid(process)}/stat").read_text().split()[3])
        group = os.getpgid(ninja)
        assert group != os.getpgrp(), "Ctrl-C would end it"
        assert os.getpriority(os.PRIO_PROCESS, process) == 19
        assert Path(f"/proc/{process}/oom_score_adj").read_text() == "1000\n"
        files = {os.readlink(path) for path in Path(f"/proc/{group}/fd").iterdir()}
        assert files == {"/dev/null", str(output), str(library.lock_path)}

    library.answer("fine", look)
    ended()
    assert "FA3 is compiled, in" in caplog.messages[-1]
    assert serves() == TRITON
    assert len(library.units.read_text().split()) == 1
    another_start()
    assert serves() == FLASHINFER


def test_a_compiler_that_fails_is_told_once_and_not_run_again(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    assert serves() == TRITON
    library.answer("no such architecture")
    ended()
    output = library.build_dir / "loom-compile.log"
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == [
        f"FA3 was not compiled (exit code 1): see {output}. Triton's prefill serves."
    ]
    assert "nvcc error: no such architecture" in output.read_text()
    assert serves() == TRITON
    assert len(library.units.read_text().split()) == 1


def test_the_compilers_outlive_the_server_and_nobody_compiles_beside_them(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    """The first server has ended when the second asks."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.rigs.flashinfer import Library, modules\n"
        "sys.modules.update(modules(Library(Path(sys.argv[1]))))\n"
        "from gpu.attention.fa3_build import _lack\n"
        "print(_lack((), 1), flush=True)\n"
    )
    command = (sys.executable, "-c", program, str(library.folder))
    first = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    assert "for the next start" in first.stdout

    def look(process: int) -> None:
        assert serves() == TRITON
        assert "Another process is compiling FA3 for this model." in caplog.messages[0]

    library.answer("fine", look)
    with library.lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # theirs until they have ended
    assert serves() == TRITON, "it was chosen"
    another_start()
    assert serves() == FLASHINFER


def test_what_flashinfer_would_compile_again_is_not_compiled(library: Library) -> None:
    """A header of a package that was installed again, and flags of another one."""
    compiled(library)
    assert serves() == FLASHINFER
    newer = library.library.stat().st_mtime + 1
    for change in (lambda: os.utime(library.header, (newer, newer)), lambda: setattr(library, "flags", "-g")):
        change()
        another_start()
        assert library.is_compiled
        assert serves() == TRITON
        library.answer("fine")
        ended()
        os.utime(library.header, (0, 0))  # it is not from the future any more
        another_start()
        assert serves() == FLASHINFER


def test_a_ninja_that_does_not_answer_holds_no_start_up(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(library)
    silent = tmp_path / "silent"
    silent.mkdir()
    (silent / "ninja").write_text("#!/bin/sh\nexec sleep 600\n")
    (silent / "ninja").chmod(0o755)
    monkeypatch.setattr(fa3_build, "ASKED_SECONDS", 0.1)
    monkeypatch.setenv("PATH", f"{silent}:{os.environ['PATH']}")
    assert not fa3_build.is_built(library)


def test_a_library_that_another_process_loads_is_compiled(library: Library) -> None:
    """FlashInfer holds its lock for that, too."""
    compiled(library)
    with library.lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert serves() == FLASHINFER


def test_a_package_of_compiled_kernels_needs_no_compiler(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library.folder / "aot.so").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert serves() == FLASHINFER


def test_what_cannot_be_compiled_is_not_begun(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.nvcc.unlink()
    assert serves() == TRITON
    assert f"there is no {library.nvcc}: install CUDA's compiler" in caplog.messages[0]
    for name, value, reason in (
        ("PATH", "", "needs ninja for FA3, which is not in PATH"),
        ("FLASHINFER_DISABLE_JIT", "1", "FLASHINFER_DISABLE_JIT is set"),
    ):
        another_start()
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert serves() == TRITON
        assert reason in caplog.messages[0]
    assert library.units.read_text() == ""


def test_who_asks_for_fa3_waits_and_is_told_for_what(library: Library) -> None:
    stages: list[tuple[str, float]] = []
    config = CONFIG._replace(progress=lambda stage, share: stages.append((stage, share)))
    assert serves("prefill=flashinfer", config) == FLASHINFER
    assert stages == [("FlashInfer compiles FA3 for this model, once: one to two minutes", 0.0)]
    assert library.units.read_text() == "", "it is FlashInfer that compiles"
    compiled(library)
    stages.clear()
    assert serves("prefill=flashinfer", config) == FLASHINFER
    assert stages == []


def test_compilers_leave_cpus_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(fa3_build, "usable_cpus", lambda: 16)
    for memory, kinds, most, jobs in (
        (128, 1, "", 8), (128, 2, "", 4), (17, 1, "", 4), (1, 1, "", 1), (128, 1, "2", 2), (128, 1, "all", 8)
    ):  # fmt: skip
        monkeypatch.setenv("MAX_JOBS", most)
        monkeypatch.setattr(fa3_build, "available_bytes", lambda memory=memory: memory * 2**30)
        assert fa3_build._jobs(kinds) == jobs


def test_flashinfers_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer itself finds a library up to date that was compiled beside a server, and we find out of date
    what it does."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    pytest.importorskip("flashinfer")
    from flashinfer.jit import core, cpp_ext, env

    units, header = tmp_path / "units", tmp_path / "prefill.cuh"
    header.touch()
    for name, line in (
        ("bin/nvcc", f'echo "$out: $in {header}" > $out.d; touch $out; echo >> {units}'),
        ("c++", "touch $out"),
    ):
        tool = tmp_path / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            '#!/bin/sh\nif [ "$1" = --version ]; then echo release 13.0,; exit; fi\n'
            'while [ $# -gt 0 ]; do case $1 in -c) in=$2;; -o) out=$2;; esac; shift; done\n' + line
        )  # fmt: skip
        tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path / "cached_ops")
    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path / "generated")
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    known: tuple[Any, ...] = (cpp_ext.get_cuda_path, cpp_ext.get_cuda_version)
    for each in known:
        each.cache_clear()
    spec = fa3_build.module_spec(*fa3_build.module_args(CONFIG, False))
    with pytest.raises(ConfigError, match="for the next start"):
        fa3_build.require_built(CONFIG)
    ended()
    count = len(units.read_text())
    assert count == len(spec.sources)
    another_start()
    fa3_build.require_built(CONFIG)
    spec.build(verbose=False)
    assert len(units.read_text()) == count
    newer = spec.jit_library_path.stat().st_mtime + 1
    os.utime(header, (newer, newer))
    another_start()
    with pytest.raises(ConfigError, match="for the next start"):
        fa3_build.require_built(CONFIG)
    ended()
    for each in known:
        each.cache_clear()
