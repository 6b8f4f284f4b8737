"""`bench.spec`: simulated acceptance is what was asked for, and a short run of cases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench import servers
from bench.chaos.tiny import CONFIG, dummy_model, flags
from bench.flags import chosen
from bench.servers import Server
from bench.spec import cases, main, wave
from bench.spec.cases import Case, Setup, every
from bench.spec.simulate import FOREVER, seed_for
from bench.spec.wave import Drafts, Wave

OUTPUT = 96

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
HEAD = {
    **{name: CONFIG[name] for name in (*SHAPE, "rms_norm_eps", "rope_theta", "max_position_embeddings")},
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
}


def test_lengths_that_a_seed_cannot_say_are_refused() -> None:
    for length in (0.5, 17.5):
        with pytest.raises(ValueError, match="accepted lengths"):
            seed_for(length)
    assert 0 <= seed_for(16.9, 16.9, FOREVER) < 2**63


def test_cases() -> None:
    names = [case.name for case in every()]
    assert len(set(names)) == len(names)
    assert [case.name for case in chosen(every(), "8b-accept1-c4,8b-accept3-c32*")] == [
        "8b-accept3-c32",
        "8b-accept1-c4",
        "8b-accept3-c32-t1",
    ]
    assert {"8b-accept3to1-c32", "30b-accept1-c8", "head-specbench-c64", "ngram-mtbench-c1"} <= set(names)
    with pytest.raises(ValueError, match="no case"):
        chosen(every(), "8b-*,7b-*")


def test_figures_of_a_case() -> None:
    none = Drafts(0, 0, 0, 0)
    pairs = [
        (Wave(100.0, 9.0, 10.0, none), Wave(speed, 12.0, 5.0, Drafts(10, 30, 20, 3)))
        for speed in (180.0, 200.0, 210.0)
    ]
    found = main.result(Case("8b", 4, 3.0, 3.0), pairs, {"input_len": 128, "output_len": 256})
    assert (found["name"], found["speedup"], found["accept_len"]) == ("8b-accept3-c4-128/256", 2.0, 3.0)
    assert (found["drafted_tokens"], found["max_drafts"]) == (90, 3)
    assert found["step_ms"] == {"base": 10.0, "spec": 15.0}
    assert "8b-accept3-c4-128/256" in main.table([found])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("spec") / "model")


@pytest.fixture(scope="module")
def head(model: Path) -> Path:
    directory = model.parent / "head"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HEAD))
    return directory


@pytest.fixture(scope="module")
def url(model: Path, head: Path) -> Iterator[str]:
    own = [*flags(model), "--speculative-draft-model-path", str(head), "--always-draft"]
    server = Server(own, model.parent / "log", "bench.spec.server")
    try:
        server.wait_ready(120)
        yield server.url
    finally:
        server.stop()


async def generate(url: str, **params: Any) -> Mapping[str, Any]:
    body = {"input_ids": list(range(3, 35)), "sampling_params": {"max_new_tokens": OUTPUT, **params}}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1.0, 2.0, 3.0, 4.0, 2.5])
async def test_a_server_accepts_what_is_asked_for(url: str, length: float, temperature: float) -> None:
    answer = await generate(url, temperature=temperature, sampling_seed=seed_for(length), ignore_eos=True)
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == OUTPUT
    assert meta["finish_reason"]["type"] == "length"
    # The last step of an answer has room for fewer drafts.
    assert meta["spec_accept_length"] == pytest.approx(length, abs=0.1 if length % 1 == 0 else 0.3)


async def test_acceptance_changes_halfway(url: str) -> None:
    seed = seed_for(3.0, 1.0, 32 + OUTPUT // 2)
    meta = (await generate(url, temperature=0, sampling_seed=seed, ignore_eos=True))["meta_info"]
    assert meta["spec_verify_ct"] == pytest.approx(OUTPUT / 2 / 3 + OUTPUT / 2, abs=3)


async def test_answers_end_at_their_stops(url: str) -> None:
    whole = await generate(url, temperature=0, sampling_seed=seed_for(3.0), ignore_eos=True)
    stop = whole["output_ids"][20]
    cut = await generate(
        url, temperature=0, sampling_seed=seed_for(3.0), ignore_eos=True, stop_token_ids=[stop]
    )
    assert cut["meta_info"]["finish_reason"]["type"] == "stop"


class Running(Server):
    """`url` for both sides, so that not every test starts servers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def wait_ready(self, timeout: float) -> float:
        return 0.0

    def stop(self) -> None: ...


@pytest.mark.parametrize("together", [True, False])
def test_a_run_of_cases(
    together: bool,
    url: str,
    model: Path,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main, "SETUPS", {"8b": Setup(str(model), str(head), together)})
    if together:  # the servers have the same flags either way
        monkeypatch.setattr(servers, "Server", lambda flags, log, module: Running(url))
    out = tmp_path / "out.json"
    out.write_text(json.dumps([{"name": "8b-accept3-c1-16/32", "speedup": 0}, {"name": "older"}]))
    sizes = ["--input-len", "16", "--output-len", "32", "--vocab-high", "200", "--rounds", "1"]
    server = ["--device", "cpu", "--chat-template", str(model / "template.jinja")]
    server += ["--spec-flags=--always-draft"]
    main.main(["--cases", "8b-accept3-c1,8b-accept1-c4", "--out", str(out), *sizes, *server])
    older, *found = json.loads(out.read_text())
    assert older["name"] == "older"
    assert [each["name"] for each in found] == ["8b-accept3-c1-16/32", "8b-accept1-c4-16/32"]
    assert all(each["speedup"] > 0 and each["base"]["tok_s"] > 0 for each in found)
    assert found[0]["accept_len"] == pytest.approx(3.0, abs=0.2)
    assert found[1]["accept_len"] == 1.0 and found[1]["drafted_tokens"] > 0
    assert "8b-accept1-c4" in capsys.readouterr().out.splitlines()[-1]


def test_what_runs_out_of_time_is_left_out(
    url: str,
    model: Path,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main, "SETUPS", {"8b": Setup(str(model), str(head))})
    monkeypatch.setattr(servers, "Server", lambda flags, log, module: Running(url))
    out = tmp_path / "out.json"
    server = ["--device", "cpu", "--chat-template", str(model / "template.jinja"), "--vocab-high", "200"]
    with pytest.raises(SystemExit):
        main.main(["--cases", "8b-accept3-c1", "--out", str(out), "--case-seconds", "0", *server])
    assert "out of time after 0 pairs" in capsys.readouterr().out
    assert not out.exists()


def test_prompts_of_data_need_their_directory(tmp_path: Path) -> None:
    case = Case(cases.NGRAM, 2, data="mtbench")
    sizes = wave.Sizes(128, 16, 200)
    with pytest.raises(ValueError, match="--data"):
        wave.workload(case, sizes, None)
    assert wave.workload(case, sizes, tmp_path).dataset == str(tmp_path / "mt_bench_question.jsonl")
