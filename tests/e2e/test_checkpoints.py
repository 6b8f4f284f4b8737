"""Real checkpoints answer as their makers would expect: `LOOM_CHECKPOINTS=DIR pytest -m slow` this file.

DIR has what `gpu/models/README.md` lists; what it has not is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from app.offline import LLM

pytestmark = pytest.mark.slow

DIRECTORY = Path(os.environ.get("LOOM_CHECKPOINTS", "nowhere"))
DEVICE = os.environ.get("LOOM_CHECKPOINTS_DEVICE", "cpu")


class Known(NamedTuple):
    """A greedy answer. `chat`: of a message, else of a prompt as it stands."""

    file: str
    says: str
    prompt: str
    chat: bool = False


KNOWN = [
    Known("SmolLM2-135M-Instruct.Q4_1.gguf", "The capital of France is Paris.",
          "What is the capital of France? Answer in one sentence.", chat=True),
    Known("gemma-3-270m-q4_k_m.gguf", " Au", "The chemical symbol for gold is"),
    Known("TinyLlama-1.1B-Chat.IQ2_XXS.gguf", "Paris", "What is the capital of France?", chat=True),
    Known("Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", "Paris", "What is the capital of France?", chat=True),
    Known("stories260K", "there was a little girl named Lily", "Once upon a time"),
]  # fmt: skip


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.file)
def test_a_known_answer(known: Known) -> None:
    path = DIRECTORY / known.file
    if not path.exists():
        pytest.skip(f"LOOM_CHECKPOINTS has no {known.file}")
    with LLM(str(path), device=DEVICE, kv_tokens=2048) as llm:
        if known.chat:
            message = [{"role": "user", "content": known.prompt}]
            (answer,) = llm.chat([message], temperature=0, max_tokens=24)
        else:
            (answer,) = llm.generate([known.prompt], temperature=0, max_tokens=24)
    print(repr(answer.text))  # with pytest -s: for the list
    assert known.says in answer.text
