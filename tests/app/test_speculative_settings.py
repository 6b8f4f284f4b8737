"""Flags of speculative decoding: ours, SGLang's, vLLM's JSON, and the same offline."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from app.offline import make_config
from app.server import public_settings
from app.settings import make_parser, parse, parse_generate
from core.config import Algorithm, Config, SpeculativeConfig
from core.errors import ConfigError
from core.speculation import resolve_algorithm
from tests.rigs.usage import usage_error

EAGLE3 = SpeculativeConfig(algorithm="eagle3", draft_model_path="org/head", num_draft_tokens=4)


def read(line: str) -> SpeculativeConfig:
    return parse(shlex.split(line)).speculative


def theirs(**config: object) -> str:
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


@pytest.mark.parametrize(
    "line",
    [
        "--speculative-algorithm eagle3 --speculative-draft-model-path org/head "
        "--speculative-num-draft-tokens 4",
        "--model-path m --speculative-algorithm EAGLE3 --speculative-draft-model org/head "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        "m " + theirs(method="eagle3", model="org/head", num_speculative_tokens=3),
        "m "
        + theirs(
            method="eagle3",
            model="org/head",
            num_speculative_tokens=3,
            prompt_lookup_max=4,
            draft_tensor_parallel_size=1,
        ),
    ],
)
def test_one_setting_in_three_spellings(line: str) -> None:
    assert read(line) == EAGLE3


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("EAGLE", "eagle"),
        ("EAGLE3", "eagle3"),
        ("STANDALONE", "draft-model"),
        ("DFLASH", "dflash"),
        ("draft_model", "draft-model"),
    ],
)
def test_names_of_algorithms(name: str, ours: str) -> None:
    path = "--speculative-draft-model-path d"
    assert read(f"{path} --speculative-algorithm {name}") == read(f"{path} --speculative-algorithm {ours}")
    offline = make_config("m", {"speculative_algorithm": name, "speculative_draft_model_path": "d"})
    assert offline.speculative == read(f"{path} --speculative-algorithm {ours}")


@pytest.mark.parametrize(
    "line",
    [
        "--speculative-algorithm mtp --speculative-num-draft-tokens 4",
        "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4",
        theirs(method="mtp", num_speculative_tokens=3),
        theirs(method="deepseek_mtp", num_speculative_tokens=3),
        theirs(method="glm4_moe_mtp", num_speculative_tokens=3),
        theirs(method="qwen3_next_mtp", num_speculative_tokens=3),
    ],
)
def test_the_models_own_layer_in_all_spellings(line: str) -> None:
    found = read(line)
    assert (found.algorithm, found.max_drafts, found.draft_model_path) == ("mtp", 3, "")
    assert resolve_algorithm(found, None, never) == found


def test_a_start_line_of_sglang_without_a_draft_model() -> None:
    assert read(
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 12 "
        "--speculative-ngram-min-match-window-size 1 --speculative-ngram-max-match-window-size 12"
    ) == SpeculativeConfig(algorithm="ngram", num_draft_tokens=12, prompt_lookup_min=1, prompt_lookup_max=12)


def test_vllms_suffix_decoding_is_ngram() -> None:
    """Suffix decoding uses a request's own text and former answers, as `ngram` does here by default."""
    assert read(theirs(method="suffix")) == SpeculativeConfig(algorithm="ngram")


def test_sglangs_capacity_of_served_text() -> None:
    found = read("--speculative-algorithm NGRAM --speculative-ngram-capacity 10000000")
    assert found == SpeculativeConfig(algorithm="ngram", ngram_capacity=10**7)


@pytest.mark.parametrize(
    ("bounds", "both"),
    [
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 5}, (5, 5)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 7}, (1, 7)),
        ({}, (2, 8)),
    ],
)
def test_vllm_takes_one_bound_of_prompt_lookup_for_both(
    bounds: dict[str, int], both: tuple[int, int]
) -> None:
    found = read(theirs(method="ngram", num_speculative_tokens=4, **bounds))
    assert (found.algorithm, found.max_drafts) == ("ngram", 4)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == both


def test_drafts_of_a_step() -> None:
    """A chain of S steps has S drafts; SGLang's draft tokens are these and the row's last token."""
    head = "--speculative-algorithm EAGLE --speculative-draft-model-path d"
    assert read(head).max_drafts == 0
    assert read(f"{head} --speculative-num-steps 3").max_drafts == 3
    assert read(f"{head} --speculative-num-draft-tokens 4").max_drafts == 3
    assert read(f"{head} --speculative-num-steps 3 --speculative-num-draft-tokens 4").max_drafts == 3
    assert read(f"{head} --speculative-num-draft-tokens 16").max_drafts == 15
    tree = f"{head} --speculative-eagle-topk 4 --speculative-num-steps 5 --speculative-num-draft-tokens"
    assert (read(f"{tree} 8").max_drafts, read(f"{tree} 32").max_drafts) == (16, 31)


WRONG = [
    ("--speculative-algorithm EAGLE3", ["eagle3", "--speculative-draft-model-path"]),
    ("--speculative-algorithm dflash", ["dflash", "--speculative-draft-model-path"]),
    ("--speculative-algorithm STANDALONE", ["draft-model", "--speculative-draft-model-path"]),
    ("--speculative-algorithm ngram --speculative-draft-model-path d", ["ngram", "takes no"]),
    ("--speculative-num-draft-tokens 4", ["need --speculative-algorithm"]),
    ("--speculative-prompt-lookup-max 3", ["need --speculative-algorithm"]),
    (
        "--speculative-draft-model-path d --speculative-prompt-lookup-max 3",
        ["--speculative-prompt-lookup-min and -max need --speculative-algorithm ngram"],
    ),
    (
        "--speculative-draft-model-path d --speculative-ngram-capacity 0",
        ["--speculative-ngram-capacity needs --speculative-algorithm ngram"],
    ),
    (
        "--speculative-draft-model-path d --speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
        ["--speculative-eagle-topk 4 drafts a tree", "needs --speculative-num-steps"],
    ),
    (
        "--speculative-draft-model-path d --speculative-eagle-topk 8 --speculative-num-steps 5 "
        "--speculative-num-draft-tokens 32",
        ["32 drafts of a request", "at most 31"],
    ),
    (
        "--speculative-draft-model-path d --speculative-eagle-topk 2 --speculative-num-steps 2 "
        "--speculative-num-draft-tokens 8",
        ["drafts 6 tokens", "at most 7, not 8"],
    ),
    ("--speculative-algorithm ngram --speculative-eagle-topk 2", ["ngram drafts no trees"]),
    ("--speculative-draft-model-path d --speculative-eagle-topk 0", ["--speculative-eagle-topk", "got 0"]),
    ("--speculative-draft-model-path d --speculative-num-draft-tokens 17", ["must be 2 to 16", "not 17"]),
    ("--speculative-draft-model-path d --speculative-num-draft-tokens 1", ["must be 2 to 16", "not 1"]),
    ("--speculative-draft-model-path d --speculative-num-draft-tokens -1", ["got -1"]),
    ("--speculative-draft-model-path d --speculative-num-steps 16", ["--speculative-num-steps", "got 16"]),
    (
        "--speculative-draft-model-path d --speculative-num-steps 3 --speculative-num-draft-tokens 8",
        ["verifies 4 tokens", "not --speculative-num-draft-tokens 8"],
    ),
    ("--speculative-algorithm ngram --speculative-num-steps 3", ["ngram", "--speculative-num-steps"]),
    (
        "--speculative-algorithm DFLASH --speculative-draft-model-path d --speculative-num-steps 3",
        ["dflash", "--speculative-num-steps"],
    ),
    ("--speculative-algorithm ngram --speculative-prompt-lookup-max 1", ["2 is more than", "1"]),
    ("--speculative-algorithm ngram --speculative-prompt-lookup-max 99", ["got 99"]),
    ("--speculative-algorithm medusa --speculative-draft-model-path d", ["medusa", "'eagle3'"]),
    (theirs(method="medusa", model="d"), ["--speculative-config", "'medusa'", "'eagle3'"]),
    (theirs(method="mtp", model="d"), ["mtp takes no", "own checkpoint has the layer", "eagle)"]),
    ("--speculative-algorithm NEXTN --speculative-draft-model-path d", ["mtp takes no"]),
    ("--speculative-algorithm EAGLE", ["eagle needs --speculative-draft-model-path, or is mtp where"]),
    ("--speculative-algorithm mtp --speculative-prompt-lookup-max 3", ["need --speculative-algorithm ngram"]),
    (theirs(method="eagle3", model="d", num_speculative_tokens=16), ["<= 15", "num_speculative_tokens"]),
    (theirs(method="eagle3", model="d", num_speculative_tokens=0), [">= 1", "num_speculative_tokens"]),
    (
        theirs(method="eagle3", model="d", num_speculative_tokens="3"),
        ["`int | null`", "num_speculative_tokens"],
    ),
    (theirs(method="eagle3", model="d", draft_tensor_parallel_size=2), ["draft_tensor_parallel_size"]),
    (theirs(method="eagle3", model="d", quantization="fp8"), ["unknown field", "`quantization`"]),
    (theirs(method="eagle3"), ["eagle3 needs --speculative-draft-model-path"]),
    (theirs(num_speculative_tokens=3), ["--speculative-config needs 'method' or 'model'"]),
    ("--speculative-config '{'", ["--speculative-config"]),
    ("--speculative-config 3", ["--speculative-config", "`object`"]),
    ("--speculative-config", ["--speculative-config: expected one argument"]),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_what_does_not_fit_together_is_one_line(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = usage_error(capsys, parse, shlex.split(line))
    assert all(word in error for word in words), error


def test_none_turns_the_rest_off() -> None:
    found = read("--speculative-algorithm none --speculative-draft-model-path d --speculative-num-steps 3")
    assert resolve_algorithm(found, {}, never).algorithm == "none"


def test_generate_knows_them_too() -> None:
    config, _ = parse_generate(["--input", "i", "--output", "o", "--speculative-algorithm", "NGRAM"])
    assert config.speculative == SpeculativeConfig(algorithm="ngram")


def test_help_explains_them() -> None:
    text = " ".join(make_parser().format_help().split())
    assert "ngram: looked up in the request's own text and in former answers" in text


# -- offline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}},
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": "org/head",
            "speculative_num_draft_tokens": 4,
        },
    ],
)
def test_settings_of_an_offline_engine(settings: dict[str, Any]) -> None:
    assert make_config("m", settings).speculative == EAGLE3


def test_an_offline_engine_without_a_draft_model() -> None:
    assert make_config("m", {"speculative_config": None}) == make_config("m", {})
    found = make_config("m", {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}})
    assert found.speculative == SpeculativeConfig(algorithm="ngram", prompt_lookup_min=3, prompt_lookup_max=3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_config": {"method": "eagle3", "rejection": 1}}, "`rejection`"),
        ({"speculative_config": {"method": 3}}, r"\$.method"),
        ({"speculative_config": "eagle3"}, "speculative-config"),
        ({"speculative_config": {"method": "medusa", "model": "d"}}, "'medusa'"),
        ({"speculative_algorithm": "eagle3"}, "--speculative-draft-model-path"),
        ({"speculative_algorithm": ["eagle3"]}, "speculative_algorithm"),
        ({"speculative_num_draft_tokens": 40, "speculative_draft_model_path": "d"}, "<= 32"),
        ({"algorithm": "ngram"}, "no setting algorithm"),
    ],
)
def test_wrong_settings_of_an_offline_engine(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config("m", settings)


# -- the algorithm of a draft model ------------------------------------------------------------------


def never(draft: Mapping[str, Any]) -> Algorithm:
    raise AssertionError("the algorithm is known")


def test_the_draft_model_says_what_it_is() -> None:
    config = read("--speculative-draft-model-path d --speculative-num-steps 3")
    assert config.algorithm == "auto"
    found = resolve_algorithm(config, {"kind": "eagle3"}, lambda draft: draft["kind"])
    assert (found.algorithm, found.max_drafts) == ("eagle3", 3)
    with pytest.raises(ConfigError, match="dflash drafts all tokens at once"):
        resolve_algorithm(config, {}, lambda draft: "dflash")


def test_what_is_named_has_to_be_what_the_draft_model_is() -> None:
    config = read("--speculative-draft-model-path d --speculative-algorithm eagle")
    assert resolve_algorithm(config, {}, lambda draft: "eagle") == config
    with pytest.raises(ConfigError, match="d drafts by eagle3, not by --speculative-algorithm eagle"):
        resolve_algorithm(config, {}, lambda draft: "eagle3")


@pytest.mark.parametrize(
    "line",
    ["--speculative-algorithm ngram", "--speculative-algorithm draft-model --speculative-draft-model-path d"],
)
def test_what_needs_no_head_is_not_guessed(line: str) -> None:
    config = read(line)
    draft = {"architectures": ["LlamaForCausalLM"]} if config.draft_model_path else None
    assert resolve_algorithm(config, draft, never) == config
    assert resolve_algorithm(SpeculativeConfig(), None, never).algorithm == "none"


def test_settings_that_clients_may_see() -> None:
    assert "speculative" not in public_settings(Config())
    shown = public_settings(
        parse(["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "/home/me/head"])
    )["speculative"]
    assert isinstance(shown, dict)
    assert shown["speculative_algorithm"] == "eagle"
    assert shown["speculative_draft_model_path"] == "head"
