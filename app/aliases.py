"""Translates command lines written for SGLang and vLLM, so that start scripts run unchanged.

A flag is renamed when it means the same, and ignored with a notice when it changes no answer. Any other is
left as it is and refused by the parser: a setting must not seem to work when it does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from core.errors import ConfigError

RENAMED: Mapping[str, str] = {
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
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
    # vLLM
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--step-tokens",
    "--gpu-memory-utilization": "--mem-fraction",
    "--block-size": "--page-size",
    "--scheduling-policy": "--order",
    "--uvicorn-log-level": "--log-level",
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
}
"""Flags without a value, to ours."""

_HALF = {"half": "float16", "float": "float32"}
_TOOLS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3_json": "llama3",
    "deepseekv3": "deepseek_v3",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
}
_REASONING = dict.fromkeys(("deepseek-r1", "deepseek_r1", "qwen3", "qwen3-thinking", "glm45"), "think")
VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": _HALF,
    "--generation-config": {"vllm": "none"},
    "--kv-dtype": {"fp8_e4m3": "fp8"},
    "--tool-parser": _TOOLS,
    "--reasoning-parser": _REASONING,
}
"""By our flag: their names of values that we have too. Other values stay, and are refused if unknown."""

_BACKEND = "each constraint runs on the backend that supports all of it"
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
    "--skip-server-warmup": "the server reports ready only after warm-up",
    "--disable-log-requests": "prompts and outputs are never logged",
    "--no-enable-log-requests": "prompts and outputs are never logged",
}
"""Flags without a value that change no answer, with the reason."""

IGNORED_VALUES: Mapping[str, str] = {
    "--max-prefill-tokens": "--step-tokens limits a step",
    "--runner": "the task is read from the checkpoint",
    "--task": "the task is read from the checkpoint",
    "--structured-outputs-config.backend": _BACKEND,
    "--guided-decoding-backend": _BACKEND,
    "--grammar-backend": _BACKEND,
    "--cuda-graph-max-bs-decode": "graphs are captured for every size up to --max-running",
    "--cuda-graph-backend-prefill": "it affects speed only, and steps are captured in one way",
    "--random-seed": "a request without a seed gets a random one",
    "--seed": "a request without a seed gets a random one",
}
"""The same for flags that take a value."""

ONLY: Mapping[str, str] = {
    "--tp": "1",
    "--tp-size": "1",
    "--tensor-parallel-size": "1",
    "--pp-size": "1",
    "--pipeline-parallel-size": "1",
    "--dp-size": "1",
    "--data-parallel-size": "1",
}
"""Flags of which only this value is supported."""

_VALUED = {*RENAMED, *VALUES, *IGNORED_VALUES, *ONLY}

_UNBOUNDED = {
    "--chunked-prefill-size": "long prompts are always prefilled in chunks",
    "--max-model-len": "the model's own length is the default",
}
"""Flags whose -1 means unlimited."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_SUFFIX = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


class Translated(msgspec.Struct, frozen=True):
    """A translated command line."""

    flags: list[str]
    notices: list[str]
    """One line for each ignored flag."""
    renamed: dict[str, str]
    """Our flag to the one that was written, for error messages."""


def translate(argv: Sequence[str]) -> Translated:
    """`argv` without the program's name. Raises `ConfigError` for a value that only they support."""
    done = Translated([], [], {})
    words = iter(argv)
    if argv[:1] == ["serve"]:
        next(words)
        if len(argv) > 1 and not argv[1].startswith("-"):  # vLLM: `serve MODEL`
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
