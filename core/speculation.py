"""Which settings of speculative decoding fit together, and which algorithm a draft model is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from core.config import MAX_DRAFTS, MAX_NODES, Algorithm, SpeculativeConfig
from core.errors import ConfigError

_WITHOUT_A_MODEL: Mapping[str, str] = {
    "ngram": "drafts are looked up in texts",
    "mtp": "the model's own checkpoint has the layer that drafts (a head in a checkpoint of its own: eagle)",
}
"""Algorithms that need no draft model, and why."""


def resolve_algorithm(
    config: SpeculativeConfig,
    draft: Mapping[str, Any] | None,
    algorithm_of: Callable[[Mapping[str, Any]], Algorithm],
) -> SpeculativeConfig:
    """`config` with its algorithm known: `auto` is what `algorithm_of` says of `draft`, the draft model's
    config.json, and `none` where there is none. Raises `ConfigError`, also for the head of another one."""
    if draft is None:
        found: Algorithm = "none" if config.algorithm == "auto" else config.algorithm
    elif config.algorithm in ("none", "draft-model"):  # any model of the vocabulary may be the small one
        found = config.algorithm
    else:
        found = algorithm_of(draft)
        if config.algorithm not in ("auto", found):
            raise ConfigError(
                f"{config.draft_model_path} drafts by {found}, "
                f"not by --speculative-algorithm {config.algorithm}"
            )
    config = replace(config, algorithm=found)
    check_speculation(config)
    return config


def check_speculation(config: SpeculativeConfig) -> None:
    """Raise `ConfigError` for settings that do not fit together. `none` turns all of them off."""
    algorithm, drafter = config.algorithm, config.draft_model_path
    if algorithm == "none" or config == SpeculativeConfig():
        return
    if algorithm == "auto" and not drafter:
        raise ConfigError(
            "settings of speculative decoding need --speculative-algorithm or --speculative-draft-model-path"
        )
    if algorithm in _WITHOUT_A_MODEL and drafter:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} takes no --speculative-draft-model-path: "
            f"{_WITHOUT_A_MODEL[algorithm]}"
        )
    if algorithm not in _WITHOUT_A_MODEL and not drafter:
        more = ", or is mtp where the model's own checkpoint has the head" if algorithm == "eagle" else ""
        raise ConfigError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path{more}")
    _check_counts(config)
    _check_lookup(config)


def _check_counts(config: SpeculativeConfig) -> None:
    tokens, steps = config.num_draft_tokens, config.num_steps
    if tokens == 1 or (config.eagle_topk == 1 and tokens > MAX_DRAFTS + 1):
        raise ConfigError(
            "--speculative-num-draft-tokens counts a request's last token too: "
            f"it must be 2 to {MAX_DRAFTS + 1}, or 0, not {tokens}"
        )
    if config.eagle_topk > 1:
        _check_tree(config)
        return
    if steps and config.algorithm in ("ngram", "dflash"):
        raise ConfigError(
            f"--speculative-algorithm {config.algorithm} drafts all tokens at once: it takes "
            "--speculative-num-draft-tokens, not --speculative-num-steps"
        )
    if steps and tokens not in (0, steps + 1):
        raise ConfigError(
            f"--speculative-num-steps {steps} drafts a chain: a step verifies {steps + 1} tokens, "
            f"not --speculative-num-draft-tokens {tokens}"
        )


def _check_tree(config: SpeculativeConfig) -> None:
    tokens, steps, topk = config.num_draft_tokens, config.num_steps, config.eagle_topk
    flag = f"--speculative-eagle-topk {topk}"
    if config.algorithm in ("ngram", "dflash"):
        raise ConfigError(f"--speculative-algorithm {config.algorithm} drafts no trees: it takes no {flag}")
    if not (tokens and steps):
        raise ConfigError(
            f"{flag} drafts a tree: it needs --speculative-num-steps and --speculative-num-draft-tokens"
        )
    if (branching := (steps - 1) * topk) > MAX_NODES:
        raise ConfigError(
            f"--speculative-num-steps {steps} with {flag} runs the draft model for {branching} drafts of a "
            f"request: (steps - 1) * topk must be at most {MAX_NODES}"
        )
    if tokens > (most := 1 + topk + branching * topk):
        raise ConfigError(
            f"--speculative-num-steps {steps} with {flag} drafts {most - 1} tokens: "
            f"--speculative-num-draft-tokens must be at most {most}, not {tokens}"
        )


def _check_lookup(config: SpeculativeConfig) -> None:
    least, most = config.prompt_lookup_min, config.prompt_lookup_max
    plain = SpeculativeConfig()
    if config.algorithm != "ngram" and (least, most) != (plain.prompt_lookup_min, plain.prompt_lookup_max):
        raise ConfigError("--speculative-prompt-lookup-min and -max need --speculative-algorithm ngram")
    if config.algorithm != "ngram" and config.ngram_capacity != plain.ngram_capacity:
        raise ConfigError("--speculative-ngram-capacity needs --speculative-algorithm ngram")
    if least > most:
        raise ConfigError(
            f"--speculative-prompt-lookup-min {least} is more than --speculative-prompt-lookup-max {most}"
        )
