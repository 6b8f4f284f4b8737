"""bench.adapters: training lowers the loss, and the engine reads the files, also the committed ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from bench.adapters.recipes import RECIPES, json_answer, read_examples
from bench.adapters.train import Adapter, held_out_loss, train
from bench.heads.data import Answered
from bench.heads.target import Target
from tests.rigs import tiny_model
from tests.rigs.lora import delta, read, shapes_of

COMMITTED = Path(__file__).parents[2] / "configs" / "adapters"
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
GSM8K = {"question": "1 + 1, doubled?", "answer": "1 + 1 = <<1+1=2>>2\n2 * 2 = <<2*2=4>>4\n#### 1,004"}
MBPP = {"text": "Add.", "code": "def add(a, b):\r\n\treturn a + b", "test_list": ["assert add(1, 2) == 3"]}
TEMPLATE = "{% for each in messages %}[{{ each.content }}]{% endfor %}"
EOS = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


@pytest.mark.parametrize("name", RECIPES)
def test_training_lowers_the_loss_and_the_engine_reads_the_same(
    name: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(path, torch.float32, torch.device("cpu"))
    rows = [Answered("a", 3, [5, 6, 7 + i, *range(20, 30)]) for i in range(8)]
    before = held_out_loss(target, rows, 64)
    torch.manual_seed(0)
    adapter = Adapter(target.spec, RECIPES[name].config)
    target.delta = adapter.delta
    assert held_out_loss(target, rows, 64) == before  # B is zero at first
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("bench.adapters.train.time", clock)
    train(adapter, target, rows, rate=0.02, tokens=64, deadline=60.0)
    size = adapter.save(tmp_path / "saved", "tiny")
    assert size == (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size
    adapter.load(tmp_path / "saved")
    assert held_out_loss(target, rows, 64) < 0.8 * before

    found = read(path, tmp_path / "saved")
    for product, module in {
        "qkv": "self_attn.q_proj",
        "out": "self_attn.o_proj",
        "gate_up": "mlp.gate_proj",
        "down": "mlp.down_proj",
    }.items():
        matrix = found[f"model.layers.1.{module}"]
        x = torch.randn(5, matrix.a.shape[-1])
        wanted = torch.cat([F.linear(x, delta(matrix, part)) for part in range(len(matrix.parts))], -1)
        made = adapter.delta(1, product, x)
        torch.testing.assert_close(torch.zeros_like(wanted) if made is None else made, wanted)


def test_loss_is_of_the_answers_alone(path: Path) -> None:
    target = Target(path, torch.float32, torch.device("cpu"))
    rows = [Answered("a", 4, [9, 8, 7, 6, 5, 4]), Answered("a", 1, [3, 4, 5])]

    def naive(row: Answered) -> Tensor:
        logits = target.logits(target.see(torch.tensor([row.ids])).final[0])
        told = slice(row.start - 1, -1)
        return F.cross_entropy(logits[told], torch.tensor(row.ids[row.start :]), reduction="sum")

    wanted = sum(float(naive(row)) for row in rows) / 4
    assert held_out_loss(target, rows, 64) == pytest.approx(wanted, rel=1e-5)


def test_examples_have_the_reference_answers(tmp_path: Path) -> None:
    lines = [GSM8K, MBPP, GSM8K, {"question": "Long", "answer": "word " * 500}]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenizer, template = Tokenizer.load(None, tiny_model.VOCAB, [EOS]), ChatTemplate(TEMPLATE)
    [one] = read_examples(tmp_path, RECIPES["gsm8k"], tokenizer, template, 256)
    assert tokenizer.decode(one.row.ids[: one.row.start]) == f"[{GSM8K['question']}]"
    assert tokenizer.decode(one.row.ids[one.row.start : -1]) == one.answer == GSM8K["answer"]
    assert one.row.ids[-1] == EOS
    [two] = read_examples(tmp_path, RECIPES["mbpp"], tokenizer, template, 256)
    assert two.answer == "def add(a, b):\n\treturn a + b"
    assert json.loads(json_answer(GSM8K)) == {"steps": ["1+1=2", "2*2=4"], "answer": 1004}
    tokenizer.close()
    template.close()


def test_committed_adapters_fit_their_model(tmp_path: Path) -> None:
    """Every tensor has a place in SmolLM2-135M; no weights are needed for that."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    saved = sorted(COMMITTED.glob("smollm2-135m-*"))
    assert {each.name for each in saved} == {f"smollm2-135m-{name}" for name in RECIPES}
    for directory in saved:
        config = json.loads((directory / "adapter_config.json").read_text())
        recipe = RECIPES[directory.name.removeprefix("smollm2-135m-")]
        assert config.items() >= recipe.config.items()
        found = read(tmp_path, directory)
        for shape in shapes_of(tmp_path):
            matrix = found[next(iter(shape.parts))]
            for part, module in enumerate(shape.parts):
                changes = module.rpartition(".")[2] in config["target_modules"]
                assert bool(delta(matrix, part).any()) == changes, module
    assert sum((each / "adapter_model.safetensors").stat().st_size for each in saved) < 3_000_000
