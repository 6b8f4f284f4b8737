"""`bench.lora`: its cases, its adapters, and a short run of each kind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.chaos.tiny import CONFIG, dummy_model
from bench.flags import chosen
from bench.lora import cases, churn, main
from bench.lora.adapters import make_adapters
from bench.lora.cases import ALL, LOADS, Case, Setup, picks
from bench.neighbours import Figures
from bench.spec.wave import NO_DRAFTS, Wave
from core.adapters import LINEAR, AdapterLimits
from gpu.adapters.pool import AdapterLayout
from gpu.build import spec_of
from gpu.models.decoder import Decoder
from gpu.weights.peft import read_adapter

MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


def test_cases() -> None:
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)
    assert {"c32-8mixed", "c128-one", "c32-base", "zipf-c128", "churn-c32", "30b-c32-8mixed"} <= set(names)
    assert [case.name for case in chosen(ALL, "zipf*,30b-*-base")] == [
        "zipf-c32", "zipf-c128", "zipf-q512", "zipf-q1024", "30b-c32-base", "30b-c128-base",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no case"):
        chosen(ALL, "c32-*,7b-*")
    # The table that servers are compared by.
    sizes = [(each.work.input_len, each.work.output_len, each.rows) for each in LOADS.values()]
    assert sizes == [(1024, 256, 32), (512, 128, 128), (512, 128, 128), (512, 128, 128)]


def test_adapters_of_requests() -> None:
    assert picks(Case("8b", "c32", "8mixed"), 6, 4) == [6, 7, 0, 1]
    assert picks(Case("8b", "c32", "one"), 6, 4) == [0] * 4
    found = Counter(picks(Case("8b", "c32", "zipf"), 0, 4000))
    # The first of 64 has a share of 1 in 4.74.
    assert found[0] / 4000 == pytest.approx(1 / 4.74, rel=0.15)
    assert found[0] > found[1] > found[7] > found[63] > 0


def test_figures() -> None:
    plain, mine = ([Wave(speed, 9.0, 8.0, NO_DRAFTS) for speed in each] for each in ((100, 80), (90, 76)))
    found = main.speeds(plain, mine)
    assert (found["base_out_tok_s"], found["out_tok_s"]) == (90.0, 83.0)
    assert found["ratio"] == 0.925 and found["ratios"] == [0.9, 0.95]
    found = main.gaps([(Figures(100, 10), Figures(98, 11)), (Figures(100, 10), Figures(99, 12.5))])
    assert (found["p99_more_ms"], found["ratio"], found["base_itl_p99_ms"]) == (1.75, 0.985, 10.0)


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
def test_adapters_are_read_and_change_all_targets(config: dict[str, Any], tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    made = make_adapters(model, tmp_path / "adapters", 3, 4, 2)
    assert made[0].name == "a0" and len(set(made)) == 3
    shapes = [each.shape for each in Decoder(spec_of(model), torch.float32, torch.device("meta")).adaptable]
    layout = AdapterLayout(shapes, AdapterLimits(places=1, max_rank=4, host=3), torch.float32)
    buffers = torch.zeros(3, layout.bytes, dtype=torch.uint8)
    for at, path in enumerate(made):
        read_adapter(path, layout.shapes, LINEAR, layout.views(buffers[at : at + 1]), config["vocab_size"])
    for lora in layout.views(buffers[:1]):
        assert lora.ranks.tolist() == [4]
        assert lora.a.abs().amin() > 0 and lora.b.abs().amin() > 0
    assert not torch.equal(buffers[0], buffers[1])
    assert torch.equal(buffers[0], buffers[2])


@pytest.mark.parametrize("together", [True, False])
def test_a_run(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dummy_model(tmp_path / "model")
    monkeypatch.setattr(main, "SETUPS", {"8b": Setup(str(model), 1, together)})
    monkeypatch.setattr(cases, "KINDS", {"8mixed": 3, "one": 1, "base": 0, "zipf": 5, "churn": 3})
    monkeypatch.setattr(churn, "PERIOD", 0.1)
    out = tmp_path / "out.json"
    out.write_text(json.dumps([{"name": "c32-one", "ratio": 0}, {"name": "older"}]))
    sizes = ["--clients", "4", "--input-len", "16", "--output-len", "24", "--vocab-high", "200"]
    wanted = "c32-*,zipf-c32,churn-c32" if together else "c32-one"
    server = ["--device", "cpu", "--chat-template", str(model / "template.jinja")]
    run = ["--cases", wanted, "--rounds", "2", "--rank", "4", "--places", "3", "--tmp", str(tmp_path)]
    main.main([*run, "--out", str(out), *sizes, *server])
    older, *found = json.loads(out.read_text())
    assert older["name"] == "older"
    assert [each["name"] for each in found] == [case.name for case in chosen(ALL, wanted)]
    for each in found:
        assert each["out_tok_s"] > 0 and each["base_out_tok_s"] > 0
        assert each["ratio"] == pytest.approx(sum(each["ratios"]) / 2, abs=1e-3)
        assert (each["concurrency"], each["rank"], each["places"]) == (4, 4, 3)
        assert "--enable-lora" in each["conditions"]["server_flags"]
    by_name = {each["name"]: each for each in found}
    assert by_name["c32-one"]["adapters"] == 1
    if together:
        assert by_name["churn-c32"]["p99_more_ms"] is not None
    assert f"{by_name['c32-one']['ratio']:.3f}" in capsys.readouterr().out
