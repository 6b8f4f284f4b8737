"""Adapters that PEFT made and saved: the text of the weights into which PEFT merged them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from core.adapters import FUSED, LINEAR
from tests.rigs import tiny_model
from tests.rigs.lora import LIMITS
from tests.rigs.runner import Rig

PROMPT = [int(i * 37 % 251) + 3 for i in range(40)]
TOKENS = 10


# PEFT asks transformers for what has a new name, and warns of patterns that it made itself.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("variant", "modules"),
    [
        ("llama", LINEAR),
        ("qwen3", LINEAR),
        ("qwen3-moe-mixed", LINEAR),
        ("phi3", [*FUSED, "o_proj", "down_proj"]),
        ("phi3", ["qkv_proj"]),
        ("phi3", ["gate_up_proj"]),
    ],
)
def test_text_is_that_of_merged_weights(variant: str, modules: Sequence[str], tmp_path: Path) -> None:
    """Transformers 5 holds experts in two parameters: PEFT turns their targets into `target_parameters`, with
    twice the rank for gate and up."""
    import peft  # here: it takes four seconds, of every worker that collects this file

    tiny = tiny_model.build(variant, tmp_path / "model")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny.reference, config)
    model.save_pretrained(tmp_path / "adapter")
    own = Rig(tiny.path, adapters=LIMITS)
    own.place("a", tmp_path / "adapter", 1)
    base = own.generate(2, PROMPT, TOKENS)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    other = Rig(tmp_path / "merged").generate(1, PROMPT, TOKENS)
    assert own.generate(1, PROMPT, TOKENS, place=1) == other != base
