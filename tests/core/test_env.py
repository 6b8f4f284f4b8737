"""How many CPU threads there are, and what the operator has set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.env import SPINS, cpu_quota, prepare_cpu_threads, usable_cpus

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def found() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.parametrize(
    ("limit", "threads"),
    [
        ("max 100000", None),
        ("800000 100000", None),
        ("250000 100000", "2"),
        ("50000 100000", "1"),
        ("?", None),
    ],
)
def test_a_quota_limits_threads(tmp_path: Path, limit: str, threads: str | None) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    prepare_cpu_threads(0, tmp_path)
    assert found() == [threads, None, str(SPINS)]


def test_no_cgroup_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == float("inf")
    prepare_cpu_threads(0, tmp_path)
    assert found() == [None, None, str(SPINS)]


@pytest.mark.parametrize(("limit", "cpus"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_usable_cpus(tmp_path: Path, limit: str, cpus: int) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert usable_cpus(tmp_path) == cpus


def test_a_system_without_affinities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    (tmp_path / "cpu.max").write_text("300000 100000")
    prepare_cpu_threads(0, tmp_path)
    assert found()[0] == "3"


def test_the_flag_goes_before_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    prepare_cpu_threads(3, tmp_path)
    assert found()[0] == "3"


def test_what_the_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    prepare_cpu_threads(0, tmp_path)
    assert found() == ["7", "PASSIVE", None]
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    prepare_cpu_threads(0, tmp_path)
    assert found()[2] == "5"
