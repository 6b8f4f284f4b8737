"""Several ranks on a CPU behind one port."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import Process, run_to_end, serving
from tests.rigs.texts import texts


async def test_two_ranks_say_what_one_says(shared: Process, tmp_path: Path) -> None:
    one = await texts(shared)
    with serving(*flags(dummy_model(tmp_path / "model")), "--tensor-parallel-size", "2") as server:
        two = await texts(server)
    assert two == one
    assert len(one[0]) > 20 and one[2].isdigit()


@pytest.mark.parametrize(
    ("ranks", "reason"), [("3", "--tp 3 does not divide num_attention_heads (4)"), ("0", "--tp")]
)
def test_ranks_that_cannot_be_are_refused_at_start(tmp_path: Path, ranks: str, reason: str) -> None:
    ended = run_to_end(*flags(dummy_model(tmp_path / "model")), "--tp", ranks)
    assert ended.returncode == 2
    assert reason in ended.stderr
