"""Benchmark and evaluation tools, unmodified, against `python -m app` with the default model.

Each is run if it is found on PATH or in one of the virtual environments of LOOM_PEERS (directories separated
by colons; usually one for each tool, because their dependencies conflict).

    python -m venv ~/peers/lm-eval && ~/peers/lm-eval/bin/pip install 'lm-eval[api]' transformers
    LOOM_PEERS=~/peers/lm-eval pytest -m slow tests/clients/test_peers.py

The benchmarks of `vllm` and `sglang` need no GPU: install torch for CPUs, them with `--no-deps`, and the
packages that they then report as missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.tiny import free_port
from tests.rigs.forked import Forked
from tests.rigs.process import serving
from tests.rigs.wait import PATIENCE

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
LIMIT = 600
"""Timeout of one tool in seconds; imports take most of it."""
KEY = "sk-" + "0123456789abcdef" * 2
"""LiteLLM's proxy rejects weaker keys."""

HOMES = [Path(home).expanduser() for home in os.environ.get("LOOM_PEERS", "").split(":") if home]

QUESTIONS = [
    {"q": "The capital of France is", "choices": [" Paris", " a banana"], "gold": 0, "a": "Paris"},
    {"q": "Two plus two is", "choices": [" purple", " four"], "gold": 1, "a": "4"},
    {"q": "The sun rises in the", "choices": [" east", " soup"], "gold": 0, "a": "east"},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
"""
CHOICE = 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ntarget_delimiter: ""\ndoc_to_target: gold\n'
TEXT = 'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
ROLL = 'doc_to_text: ""\ndoc_to_target: "{{q}}"\n'
TASKS = {
    "loom_choice": ("multiple_choice", CHOICE, "acc"),
    "loom_text": ("generate_until", TEXT, "exact_match"),
    "loom_roll": ("loglikelihood_rolling", ROLL, "word_perplexity"),
}


def tool(name: str) -> str:
    """The path of an executable; skips the test if it is not installed."""
    path = os.pathsep.join([*(str(home / "bin") for home in HOMES), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def python_with(package: str) -> str:
    """The interpreter of a virtual environment with `package`; skips the test if there is none."""
    for home in HOMES:
        if list(home.glob(f"lib/python*/site-packages/{package}")):
            return str(home / "bin" / "python")
    pytest.skip(f"needs {package}")


def run(*command: str, cwd: Path, offline: bool = True) -> str:
    """Run a tool and return its output. `offline`: without access to the Hugging Face hub."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **({"HF_HUB_OFFLINE": "1"} if offline else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def fetch(url: str, body: object = None, key: str = "none") -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return bytes(answer.read())


def wait(url: str, alive: subprocess.Popen[bytes] | subprocess.Popen[str] | Forked) -> None:
    """Wait until `url` answers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert alive.poll() is None
        try:
            fetch(url)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # On a GPU, if there is one, and CUDA may not work in a fork.
    with serving("--control-routes", "--log-level", "warning", own=True) as server:
        wait(f"{server.url}/health", server.process)
        yield server.url


@pytest.fixture(scope="module")
def tokenizer(url: str) -> str:
    return str(json.loads(fetch(f"{url}/model_info"))["tokenizer_path"])


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_sglang_bench_serving(url: str, tmp_path: Path, backend: str) -> None:
    """The tool gets model and tokenizer from the server, and flushes the cache first."""
    python = python_with("sglang")
    lengths = ("--random-input-len", "32", "--random-output-len", "16", "--random-range-ratio", "1")
    traffic = ("--dataset-name", "random-ids", "--num-prompts", "6", "--max-concurrency", "3", *lengths)
    server = ("--backend", backend, "--base-url", url, "--flush-cache", "--output-file", "result.jsonl")
    run(python, "-m", "sglang.bench_serving", *server, *traffic, cwd=tmp_path)
    result = json.loads((tmp_path / "result.jsonl").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 96)


@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_vllm_bench_serve(url: str, tmp_path: Path, backend: str) -> None:
    """Without --model: the tool gets model and tokenizer from the server's `/v1/models`."""
    path = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    lengths = ("--random-input-len", "24", "--random-output-len", "12", "--ignore-eos")
    traffic = ("--dataset-name", "random", "--num-prompts", "5", "--max-concurrency", "2", *lengths)
    result = ("--save-result", "--result-dir", ".", "--result-filename", "result.json", "--profile")
    run(
        tool("vllm"), "bench", "serve", "--backend", backend, "--endpoint", path, "--base-url", url,
        *traffic, *result, cwd=tmp_path,
    )  # fmt: skip
    result = read(tmp_path / "result.json")
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (5, 0, 60)


def test_guidellm(url: str, tokenizer: str, tmp_path: Path) -> None:
    run(
        tool("guidellm"), "run",
        "--backend", f"kind=openai_http,target={url}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=4",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--output", "kind=json,path=result.json",
        "--disable-progress",
        cwd=tmp_path,
    )  # fmt: skip
    totals = read(tmp_path / "result.json")["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    # With two streams it may stop before it counts the last answer.
    assert totals["successful"] == totals["total"] >= 3


@pytest.mark.parametrize("local", [True, False], ids=["its tokenizer", "the server's"])
def test_lm_eval(url: str, tokenizer: str, tmp_path: Path, local: bool) -> None:
    """Log-likelihoods of choices and of whole texts, and generation. Without a local tokenizer the tool uses
    the server's (`/tokenizer_info`)."""
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    for name, (kind, fields, metric) in TASKS.items():
        text = (
            TASK.format(name=name, data=data, kind=kind) + fields + f"metric_list: [{{metric: {metric}}}]\n"
        )
        (tmp_path / f"{name}.yaml").write_text(text)
    arguments = f"model={MODEL},base_url={url}/v1/completions,num_concurrent=2"
    arguments += f",tokenizer_backend=huggingface,tokenizer={tokenizer}" if local else ""
    output = run(
        tool("lm_eval"), "--model", "local-completions", "--model_args", arguments,
        "--include_path", str(tmp_path), "--tasks", ",".join(TASKS),
        "--batch_size", "2" if local else "1", "--output_path", "result",
        cwd=tmp_path,
    )  # fmt: skip
    assert ("remote tokenizer from" in output) is not local
    (result,) = (tmp_path / "result").rglob("results_*.json")
    results = read(result)["results"]
    assert results["loom_choice"]["acc,none"] == 1.0
    assert 500 < results["loom_roll"]["word_perplexity,none"] < 2000


def test_aiperf(url: str, tokenizer: str, tmp_path: Path) -> None:
    run(
        tool("aiperf"), "profile", "-m", MODEL, "--url", url, "--tokenizer", tokenizer,
        "--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", "4",
        "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--ui", "none",
        "--output-artifact-dir", "result",
        cwd=tmp_path, offline=False,  # offline it does not accept a directory as tokenizer
    )  # fmt: skip
    (result,) = (tmp_path / "result").rglob("profile_export_aiperf.json")
    results = read(result)
    assert (results["completed_request_count"]["avg"], results["error_summary"]) == (4, [])


def test_litellm_proxy(url: str, tmp_path: Path) -> None:
    """Chat, a stream, Anthropic's messages and responses through the proxy."""
    with proxy(url, tmp_path) as base:
        hi = {"model": "sea", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3}
        chat = json.loads(fetch(f"{base}/v1/chat/completions", hi, KEY))
        assert chat["usage"]["completion_tokens"] == 3
        stream = fetch(f"{base}/v1/chat/completions", {**hi, "stream": True}, KEY).decode()
        assert stream.count('"content"') == 3 and stream.endswith("data: [DONE]\n\n")
        message = json.loads(fetch(f"{base}/v1/messages", {**hi, "max_tokens": 16}, KEY))
        assert message["content"][0]["text"]
        response = {"model": "sea", "input": "Say hi.", "max_output_tokens": 16}
        assert json.loads(fetch(f"{base}/v1/responses", response, KEY))["output"][0]["content"][0]["text"]


@contextmanager
def proxy(url: str, directory: Path) -> Iterator[str]:
    """LiteLLM's proxy, with the server as its only model."""
    command = tool("litellm")
    settings = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    config = directory / "proxy.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "sea", "litellm_params": settings}]}))
    port = free_port()
    with (directory / "proxy.log").open("w") as log:
        process = subprocess.Popen(
            [command, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
            cwd=directory,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            wait(f"http://127.0.0.1:{port}/health/liveliness", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
