"""Start lines of SGLang and vLLM mean the same here, or are refused in one line."""

from __future__ import annotations

import re
import shlex

import pytest

from app.aliases import IGNORED, IGNORED_VALUES, ONLY, RENAMED, SWITCHES, VALUES, translate
from app.settings import make_parser, parse, parse_generate
from bench.chaos.tiny import ROOT
from core.config import Config
from tests.rigs.usage import usage_error

OURS = {flag for action in make_parser()._actions for flag in action.option_strings}


def read(line: str) -> Config:
    return parse(shlex.split(line.removeprefix("serve ")))


def test_every_alias_leads_to_a_flag_that_exists() -> None:
    assert {*RENAMED.values(), *VALUES, *(words[0] for words in SWITCHES.values())} <= OURS


def page(heading: str) -> list[list[str]]:
    """Rows of a table of app/aliases.md: of each cell the words in code."""
    text = (ROOT / "app/aliases.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" |") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_has_all_that_is_translated_and_nothing_else() -> None:
    flags = page("Flags with a value")
    assert {(theirs, code(ours)[0]) for ours, *cells in flags for theirs in code(" ".join(cells))} == {
        *RENAMED.items()
    }
    switches = {
        code(theirs)[0]: tuple(code(ours)[0].split()) for theirs, ours in page("Flags without a value")
    }
    assert switches == SWITCHES
    values = {
        (code(flag)[0], word, code(ours)[0]) for flag, theirs, ours in page("Values") for word in code(theirs)
    }
    assert values == {(flag, *pair) for flag, words in VALUES.items() for pair in words.items()}
    ignored = {flag: why for theirs, why in page("Ignored with a notice") for flag in code(theirs)}
    assert ignored == {**IGNORED, **IGNORED_VALUES}
    assert {code(flag)[0]: code(value)[0] for flag, value in page("One value only")} == ONLY


def test_the_start_lines_of_the_page_mean_the_same() -> None:
    text = (ROOT / "app/aliases.md").read_text().partition("```bash\n")[2].partition("```")[0]
    of_vllm, of_sglang = (line.removeprefix("loom serve ") for line in text.splitlines())
    assert read(of_vllm) == read(of_sglang) != Config()


def test_no_alias_hides_a_flag_of_ours() -> None:
    assert not OURS & {*RENAMED, *SWITCHES, *IGNORED, *IGNORED_VALUES, *ONLY}


def test_mapped_values_are_ones_we_have() -> None:
    for flag, words in VALUES.items():
        for word in words.values():
            make_parser().read([flag, word])


def test_a_start_line_of_sglang() -> None:
    theirs = read(
        "--model-path org/m --tokenizer-path t --mem-fraction-static 0.8 --max-running-requests 64 "
        "--chunked-prefill-size 4096 --schedule-policy lpm --schedule-conservativeness 0.5 "
        "--disable-overlap-schedule --context-length 1000 --page-size 1 --max-total-tokens 9000 "
        "--max-queued-requests 7 --tool-call-parser qwen25 --reasoning-parser qwen3 --tp-size 2 "
        "--disable-radix-cache --radix-eviction-policy lfu --dtype half --port 30000 "
        "--kv-cache-dtype fp8_e4m3"
    )
    assert theirs == read(
        "--model org/m --tokenizer t --mem-fraction 0.8 --max-running 64 --step-tokens 4096 --order lpm "
        "--conservativeness 0.5 --overlap-depth 0 --context-length 1000 --page-size 1 --kv-tokens 9000 "
        "--max-queued 7 --tool-parser hermes --reasoning-parser think --no-radix-cache --eviction lfu "
        "--tp 2 --dtype float16 --port 30000 --kv-dtype fp8"
    )


@pytest.mark.parametrize(
    "theirs",
    [
        "--enable-lora --lora-paths a=/x/a b=org/b --max-loras-per-batch 4 --max-loaded-loras 9 "
        "--lora-backend csgmv --enable-lora-overlap-loading --lora-eviction-policy lru",
        "--enable-lora --lora-modules a=/x/a b=org/b --max-loras 4 --max-cpu-loras 9 --fully-sharded-loras "
        "--lora-dtype auto",
    ],
)
def test_flags_of_adapters(theirs: str) -> None:
    rest = "--max-lora-rank 32 --lora-target-modules q_proj v_proj --port 0"
    lora = read(f"{theirs} {rest}").lora
    ours = "--enable-lora --lora a=/x/a --lora b=org/b --max-loras-per-batch 4 --max-loaded-loras 9"
    assert lora == read(f"{ours} {rest}").lora
    assert (lora.lora, lora.max_lora_rank) == (("a=/x/a", "b=org/b"), 32)


def test_several_served_names() -> None:
    assert read("serve m --served-model-name a b/c d --port 0").model.served_model_name == ("a", "b/c", "d")
    assert read("--served-model-name a --port 0").model.served_model_name == ("a",)
    assert read("--port 0").model.served_model_name == ()


def test_the_line_of_each_request_is_off_unless_asked_for() -> None:
    assert not read("--port 0").serve.access_log
    assert read("--access-log").serve.access_log
    assert not read("--access-log --disable-uvicorn-access-log").serve.access_log


@pytest.mark.parametrize("flag", ["--enforce-eager", "--disable-cuda-graph"])
def test_graphs_are_turned_off_by_their_flags(flag: str) -> None:
    assert read(f"{flag} --port 0").schedule.cuda_graphs is False


def test_flags_that_start_lines_of_others_carry(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = read(
        "serve m --enable-prompt-tokens-details --structured-outputs-config.backend xgrammar "
        "--grammar-backend llguidance --cuda-graph-max-bs-decode 64 --cuda-graph-backend-prefill full "
        "--enable-custom-logit-processor --enable-force-include-usage --return-tokens-as-token-ids "
        "--root-path /llm/v2 --logprobs-mode processed_logprobs"
    )
    assert theirs == read(
        "--model m --force-include-usage --return-tokens-as-token-ids --root-path /llm/v2 "
        "--logprobs-mode processed_logprobs"
    )
    assert capsys.readouterr().err.count("is ignored") == 6
    assert (theirs.serve.force_include_usage, theirs.serve.return_tokens_as_token_ids) == (True, True)


def test_a_start_line_of_vllm() -> None:
    theirs = read(
        "serve org/m --max-model-len 32K --max-num-seqs 64 --max_num_batched_tokens=8k "
        "--gpu-memory-utilization=0.9 --block-size 32 --no-enable-prefix-caching "
        "--scheduling-policy priority --served-model-name n --tool-call-parser llama3_json "
        "--reasoning-parser=deepseek_r1"
    )
    assert theirs == read(
        "--model org/m --context-length 32768 --max-running 64 --step-tokens 8000 --mem-fraction 0.9 "
        "--page-size 32 --no-radix-cache --order priority --served-model-name n --tool-parser llama3 "
        "--reasoning-parser think"
    )


def test_generate_knows_them_too() -> None:
    config, _ = parse_generate(shlex.split("--input i --output o --model-path m --max-num-seqs 3"))
    assert (config.model.model, config.schedule.max_running) == ("m", 3)


@pytest.mark.parametrize("flag", [*IGNORED, *(f"{name}=1" for name in IGNORED_VALUES)])
def test_what_changes_nothing_is_ignored_with_a_notice(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([flag]) == parse([])
    error = capsys.readouterr().err
    assert error.startswith(f"loom: note: {flag.partition('=')[0]} is ignored: ")
    assert error.count("\n") == 1


def test_replicas_have_their_names() -> None:
    ours = read("--dp 4 --base-gpu-id 2 --gpu-id-step 2 --load-balance-method fewest-tokens")
    assert read("--dp-size 4 --base-gpu-id 2 --gpu-id-step 2 --load-balance-method total_tokens") == ours
    assert ours.parallel.dp == read("--data-parallel-size 4").parallel.dp == 4
    assert [ours.parallel.gpu(replica) for replica in range(4)] == [2, 4, 6, 8]
    ranks = read("--tp 2 --dp 2 --base-gpu-id 1").parallel
    assert [ranks.gpu(replica, rank) for replica in range(2) for rank in range(2)] == [1, 2, 3, 4]


def test_no_bound_is_no_bound() -> None:
    assert parse(["--chunked-prefill-size", "-1", "--max-model-len", "auto"]) == parse([])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tp-size 0", ["--tp-size", "0"]),
        ("--dp-size 0", ["--dp-size", "0"]),
        ("--tensor-parallel-size", ["--tensor-parallel-size"]),
        ("--quantization bitsandbytes", ["--quantization", "bitsandbytes"]),
        ("--tool-call-parser jamba", ["--tool-call-parser", "jamba", "hermes"]),
        ("--max-num-seqs many", ["--max-num-seqs", "many"]),
        ("--kv-cache-dtype fp8_e5m2", ["--kv-cache-dtype", "fp8_e5m2"]),
        ("--chunked-prefill-size 2", ["--chunked-prefill-size", "2"]),
        ("--max-num-seqs", ["--max-num-seqs"]),
        ("--trust-remote-code=yes", ["--trust-remote-code=yes"]),
        ("serve one two", ["two"]),
    ],
)
def test_what_we_lack_is_one_line_about_what_was_written(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = usage_error(capsys, parse, line.removeprefix("serve ").split())
    assert all(word in error for word in words), error


def test_a_value_is_never_taken_for_a_flag() -> None:
    assert translate(["--model-path", "serve"]).flags == ["--model", "serve"]
    assert translate(["m", "--port", "1"]).flags == ["--model", "m", "--port", "1"]


def test_help_says_so() -> None:
    assert "SGLang" in make_parser().format_help()
