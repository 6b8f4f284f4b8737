"""llama.cpp reads the files that `tests/rigs/gguf_file.py` writes as the models that they were made from: the
writer does what llama.cpp's converter does.

    python -m venv ~/peers/llama && ~/peers/llama/bin/pip install xllamacpp
    LOOM_PEERS=~/peers/llama pytest -n0 -m slow tests/gpu/test_gguf_peer.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs import tiny_model
from tests.rigs.gguf_file import CASES, write

pytestmark = pytest.mark.slow

_PEER = """
import json, os, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity = sys.argv[1], 256, 1, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
asked = {"max_tokens": 2, "temperature": 0, "logprobs": 20, "cache_prompt": False}
for prompt in json.loads(sys.argv[2]):
    reply = server.handle_completions(asked | {"prompt": prompt})
    first = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    print("FOUND", json.dumps({each["id"]: each["logprob"] for each in first}), flush=True)
os._exit(0)
"""

_HYBRID = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_value_head_dim": 16,  # as of keys
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek-v2": {"q_lora_rank": 24},  # that there is none it knows by the layers of V2-Lite
    "deepseek-v2-groups": {"q_lora_rank": 24},
    "gpt-oss": {"rope_parameters": {**_YARN, "truncate": True}},  # as it always does
    "olmo2-yarn": {"attention_bias": False, "tie_word_embeddings": False},
    "phi3": {"sliding_window": None},  # which it leaves out
    "qwen3-next": _HYBRID,
    "qwen3.5": _HYBRID,
    "qwen3.5-moe": _HYBRID,
}
"""Changes for what llama.cpp does not do."""


def python() -> str:
    for home in filter(None, os.environ.get("LOOM_PEERS", "").split(":")):
        found = Path(home).expanduser() / "bin" / "python"
        if list(Path(home).expanduser().glob("lib/*/site-packages/xllamacpp")):
            return str(found)
    pytest.skip("needs a virtual environment with xllamacpp in LOOM_PEERS")


@pytest.mark.parametrize(
    ("arch", "variant", "fields"), CASES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_log_probabilities_are_those_of_llama_cpp(
    arch: str, variant: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Most log-probabilities of the 20 best tokens are within 0.02, where a field or tensor read wrongly
    makes 0.4 to 7. Texts are longer than windows and than the positions behind which LongRoPE has other
    factors."""
    peer = python()
    tiny = tiny_model.build(variant, tmp_path / "hf", **fields | CHANGES.get(variant, {}))
    file = write(tmp_path / "tiny.gguf", arch, tiny.reference)
    prompts = [[i * 37 % 251 + 3 for i in range(length)] for length in (25, 40)]
    done = subprocess.run(
        [peer, "-c", _PEER, str(file), json.dumps(prompts)], capture_output=True, text=True, timeout=60
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(prompts), done.stderr[-2000:]
    for prompt, theirs in zip(prompts, found, strict=True):
        want = torch.log_softmax(tiny_model.logits(tiny.reference, prompt)[-1], -1)
        assert max(abs(want[int(token)].item() - each) for token, each in theirs.items()) < 0.2
