"""Translates command lines written for SGLang and vLLM, so that start scripts run unchanged.

A flag is renamed when it means the same, and ignored with a notice when it changes no answer. Any other is
left as it is and refused by the parser: a setting must not seem to work when it does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.config import MAX_DRAFTS
from core.errors import ConfigError

RENAMED: Mapping[str, str] = {
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--json-model-override-args": "--hf-overrides",
    "--mem-fraction-static": "--mem-fraction",
    "--max-total-tokens": "--kv-tokens",
    "--max-running-requests": "--max-running",
    "--max-queued-requests": "--max-queued",
    "--chunked-prefill-size": "--step-tokens",
    "--schedule-policy": "--order",
    "--schedule-conservativeness": "--conservativeness",
    "--priority-scheduling-preemption-threshold": "--preemption-gap",
    "--radix-eviction-policy": "--eviction",
    "--kv-cache-dtype": "--kv-dtype",
    "--tool-call-parser": "--tool-parser",
    "--fastapi-root-path": "--root-path",
    "--lora-paths": "--lora",
    "--crash-dump-folder": "--dump-requests",
    "--tp-size": "--tp",
    "--dp-size": "--dp",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--speculative-ngram-min-match-window-size": "--speculative-prompt-lookup-min",
    "--speculative-ngram-max-match-window-size": "--speculative-prompt-lookup-max",
    # vLLM
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--step-tokens",
    "--gpu-memory-utilization": "--mem-fraction",
    "--block-size": "--page-size",
    "--scheduling-policy": "--order",
    "--uvicorn-log-level": "--log-level",
    "--lora-modules": "--lora",
    "--tensor-parallel-size": "--tp",
    "--max-loras": "--max-loras-per-batch",
    "--max-cpu-loras": "--max-loaded-loras",
    "--data-parallel-size": "--dp",
}
"""Flags that take a value, to ours."""

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "--disable-radix-cache": ("--no-radix-cache",),
    "--enable-force-include-usage": ("--force-include-usage",),
    "--disable-overlap-schedule": ("--overlap-depth", "0"),
    "--enable-priority-scheduling": ("--order", "priority"),
    "--disable-cuda-graph": ("--no-cuda-graphs",),
    "--enforce-eager": ("--no-cuda-graphs",),
    "--async-scheduling": ("--overlap-depth", "1"),
    "--no-async-scheduling": ("--overlap-depth", "0"),
    "--enable-prefix-caching": ("--radix-cache",),
    "--no-enable-prefix-caching": ("--no-radix-cache",),
    "--disable-uvicorn-access-log": ("--no-access-log",),
}
"""Flags without a value, to ours."""

_HALF = {"half": "float16", "float": "float32"}
_TOOLS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3_json": "llama3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "granite4": "hermes",
    "minimax-m2": "minimax_m2",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    **dict.fromkeys(("openai", "gpt-oss", "gpt_oss"), "harmony"),
}
_REASONING = {
    **dict.fromkeys(
        (
            *("deepseek-r1", "deepseek_r1", "deepseek-v3", "deepseek_v3", "qwen3", "qwen3-thinking", "glm45"),
            *("deepseek-v4", "deepseek_v4", "glm47", "kimi_k2", "minimax", "minimax_m2", "olmo3"),
        ),
        "think",
    ),
    **dict.fromkeys(("openai_gptoss", "gpt-oss", "gpt_oss", "openai"), "harmony"),
}
ALGORITHMS: Mapping[str, str] = {
    # SGLang
    "NGRAM": "ngram",
    "EAGLE": "eagle",
    "NEXTN": "mtp",
    "EAGLE3": "eagle3",
    "DFLASH": "dflash",
    "STANDALONE": "draft-model",
    # vLLM
    "draft_model": "draft-model",
    "suffix": "ngram",
    **dict.fromkeys(
        ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"
    ),
}
"""SGLang's and vLLM's names of speculative algorithms, to ours; other names are the same."""
VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": _HALF,
    "--generation-config": {"vllm": "none"},
    "--kv-dtype": {"fp8_e4m3": "fp8"},
    # The checkpoint's config.json says how it is quantized.
    "--quantization": {
        **dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16", "compressed-tensors"), "auto"
        ),
        "w8a8_int8": "int8",
    },
    "--tool-parser": _TOOLS,
    "--reasoning-parser": _REASONING,
    "--speculative-algorithm": ALGORITHMS,
    "--load-balance-method": {
        "auto": "cached-prefix",
        "round_robin": "round-robin",
        "shortest_queue": "shortest-queue",
        "total_requests": "shortest-queue",
        "minimum_tokens": "fewest-tokens",
        "total_tokens": "fewest-tokens",
    },
}
"""SGLang's and vLLM's names of our values, by our flag. Other values stay, and are refused if unknown."""

_BACKEND = "each constraint runs on the backend that supports all of it"
_CHAIN = "it affects speed only, and looked up drafts are a chain"
IGNORED: Mapping[str, str] = {
    "--trust-remote-code": "code of checkpoints is never run",
    "--enable-auto-tool-choice": "tool calls are always enabled for a model that supports them",
    "--enable-chunked-prefill": "long prompts are always prefilled in chunks",
    "--no-enable-chunked-prefill": "long prompts are always prefilled in chunks",
    "--enable-metrics": "/metrics is always served",
    "--enable-cache-report": "cached tokens are always reported",
    "--is-embedding": "the task is read from the checkpoint; generative models serve embeddings too",
    "--enable-prompt-tokens-details": "cached tokens are always reported",
    "--enable-custom-logit-processor": "requests may name those of --logit-processor",
    "--enable-return-hidden-states": "every request may ask for hidden states",
    "--enable-return-routed-experts": "every request may ask for routed experts",
    "--enable-prompt-embeds": "prompt embeddings are always accepted: nothing is unpickled",
    "--enable-lora-overlap-loading": "adapters are always copied to the device while steps run",
    "--experts-shared-outer-loras": "the layout of experts is read from each adapter",
    "--lora-use-virtual-experts": "it affects speed only",
    "--fully-sharded-loras": "ranks hold what adapters change of their own shards",
    "--specialize-active-lora": "it affects speed only",
    "--skip-server-warmup": "the server reports ready only after warm-up",
    "--enable-trace": "--otlp-traces-endpoint turns spans on",
    "--disable-log-requests": "prompts and outputs are never logged",
    "--no-enable-log-requests": "prompts and outputs are never logged",
}
"""Flags without a value that change no answer, with the reason."""

IGNORED_VALUES: Mapping[str, str] = {
    "--collect-detailed-traces": "spans always have queue, prefill and decode below them",
    "--max-prefill-tokens": "--step-tokens limits a step",
    "--runner": "the task is read from the checkpoint",
    "--task": "the task is read from the checkpoint",
    "--structured-outputs-config.backend": _BACKEND,
    "--guided-decoding-backend": _BACKEND,
    "--grammar-backend": _BACKEND,
    "--speculative-ngram-match-type": _CHAIN,
    "--speculative-ngram-max-bfs-breadth": _CHAIN,
    "--speculative-ngram-max-trie-depth": _CHAIN,
    "--speculative-ngram-min-bfs-breadth": _CHAIN,
    "--cuda-graph-max-bs-decode": "graphs are captured for every size up to --max-running",
    "--cuda-graph-backend-prefill": "it affects speed only, and steps are captured in one way",
    "--lora-backend": "it affects speed only",
    "--max-lora-chunk-size": "it affects speed only",
    "--random-seed": "a request without a seed gets a random one",
    "--seed": "a request without a seed gets a random one",
}
"""Flags that take a value and change no answer, with the reason."""

ONLY: Mapping[str, str] = {
    "--pp-size": "1",
    "--pipeline-parallel-size": "1",
    "--lora-dtype": "auto",
    "--lora-eviction-policy": "lru",
}
"""Flags of which only this value is supported."""

SPECULATION = "--speculative-config"
"""vLLM's flag of which one JSON object is the value."""

THEIRS = frozenset({*RENAMED, *SWITCHES, *IGNORED, *IGNORED_VALUES, *ONLY, SPECULATION})
"""All flags of SGLang and vLLM that are known here."""

_VALUED = {*RENAMED, *VALUES, *IGNORED_VALUES, *ONLY, SPECULATION}

_UNBOUNDED = {
    "--chunked-prefill-size": "long prompts are always prefilled in chunks",
    "--max-model-len": "the model's own length is the default",
}
"""Flags whose -1 means unlimited."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_SUFFIX = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


class _Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `speculative_config`."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_tensor_parallel_size: Literal[1] | None = None


def speculation(given: str | Mapping[str, Any]) -> dict[str, str | int]:
    """Settings of ours, by name, from vLLM's `speculative_config`, which is JSON or an object. Raises
    `ConfigError` that names what is wrong."""
    try:
        if isinstance(given, str):
            read = msgspec.json.decode(given, type=_Speculation)
        else:
            read = msgspec.convert(given, _Speculation)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise ConfigError(f"{SPECULATION}: {error}") from None
    if read.method is None and read.model is None:
        raise ConfigError(f"{SPECULATION} needs 'method' or 'model'")
    drafts = read.num_speculative_tokens
    named: dict[str, str | int | None] = {
        "algorithm": None if read.method is None else ALGORITHMS.get(read.method, read.method),
        "draft_model_path": read.model,
        "num_draft_tokens": None if drafts is None else drafts + 1,
    }
    if read.method == "ngram":  # vLLM takes no notice of them elsewhere, and one of them for both
        least, most = read.prompt_lookup_min, read.prompt_lookup_max
        named["prompt_lookup_min"] = most if least is None else least
        named["prompt_lookup_max"] = least if most is None else most
    return {f"speculative_{name}": value for name, value in named.items() if value is not None}


class Translated(msgspec.Struct, frozen=True):
    """A translated command line."""

    flags: list[str]
    notices: list[str]
    """One line for each ignored flag."""
    renamed: dict[str, str]
    """Our flag to the one that was written, for error messages."""


def translate(argv: Sequence[str]) -> Translated:
    """`argv` without the names of the program and the command. Raises `ConfigError` for a value that only
    they support."""
    done = Translated([], [], {})
    words = iter(argv)
    if argv and not argv[0].startswith("-"):  # vLLM: `serve MODEL`
        done.flags.extend(("--model", next(words)))
    for word in words:
        _take(done, word, words)
    return done


def _take(done: Translated, word: str, rest: Iterator[str]) -> None:
    written, equals, value = word.partition("=")
    name = written.replace("_", "-")  # vLLM accepts both
    if name in SWITCHES and not equals:
        done.flags.extend(SWITCHES[name])
    elif name in IGNORED and not equals:
        done.notices.append(f"{name} is ignored: {IGNORED[name]}")
    elif name in _VALUED:
        _valued(done, name, value if equals else next(rest, None))
    else:
        done.flags.append(name + equals + value if word.startswith("--") else word)


def _valued(done: Translated, name: str, value: str | None) -> None:
    if name in IGNORED_VALUES:
        done.notices.append(f"{name} is ignored: {IGNORED_VALUES[name]}")
        return
    if name in ONLY:
        if value != ONLY[name]:
            raise ConfigError(f"{name} {value} is not available: only {ONLY[name]} is")
        return
    if name in _UNBOUNDED and value in ("-1", "auto"):
        done.notices.append(f"{name} {value} is ignored: {_UNBOUNDED[name]}")
        return
    if name == SPECULATION:
        if value is None:
            raise ConfigError(f"argument {name}: expected one argument")
        for setting, text in speculation(value).items():
            flag = "--" + setting.replace("_", "-")
            done.renamed[flag] = name
            done.flags.extend((flag, str(text)))
        return
    ours = RENAMED.get(name, name)
    if ours != name:
        done.renamed[ours] = name
    done.flags.append(ours)
    if value is not None:
        done.flags.append(VALUES.get(ours, {}).get(value, _count(value)))


def _count(text: str) -> str:
    """vLLM's `32k` (32,000) and `32K` (32,768) as digits; anything else unchanged."""
    found = _COUNT.fullmatch(text)
    return text if found is None else str(int(float(found[1]) * _SUFFIX[found[2]]))
