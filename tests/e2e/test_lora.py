"""Adapters through every layer of one server: more than places and than host memory, beside base requests."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import torch
import transformers

from core.adapters import TARGETS
from tests.rigs import lora, tiny_model
from tests.rigs.process import Process, read_events, serving
from tests.rigs.vocabularies import byte_level
from tests.rigs.wait import PATIENCE

NAMES = "abcde"
VOCAB = 288
TOKENS = 10
PROMPTS = ("the sea is", "the sea is blue and the sky above it is " * 3)
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
GREEDY = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}


class World(NamedTuple):
    """A server with `a` and, pinned, `b`, and what each adapter says."""

    server: Process
    roots: Path
    references: dict[str, transformers.PreTrainedModel]
    texts: dict[str, list[list[int]]]
    """Greedy tokens of merged weights for each of `PROMPTS`; "" is the base model."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("lora")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other where the server has the other cores
    base = tiny_model.build("qwen3-moe", home / "tiny", vocab_size=VOCAB)
    tokenizer = byte_level()
    tokenizer.save(str(base.path / "tokenizer.json"))
    (base.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    references = {"": base.reference}
    for seed, name in enumerate(NAMES, 1):
        adapter = lora.adapter_for(base.path, TARGETS, rank=seed, seed=seed)
        lora.save(adapter, home / "roots" / name, alpha=2 * seed, rank=seed)
        merged = lora.merged(base.path, adapter, home / f"merged-{name}")
        read = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        references[name] = read.eval()
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    texts = {
        name: [tiny_model.greedy(model, prompt, TOKENS) for prompt in ids]
        for name, model in references.items()
    }
    assert len({str(each) for each in texts.values()}) == len(texts)
    pinned = {"lora_name": "b", "lora_path": str(home / "roots" / "b"), "pinned": True}
    flags = [
        *("--model", str(base.path), "--device", "cpu", "--kv-tokens", "4096", "--control-routes"),
        *(
            "--lora-paths",
            f"a={home / 'roots' / 'a'}",
            json.dumps(pinned),
            "--lora-root",
            str(home / "roots"),
        ),
        *("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8", "--lora-target-modules", "all"),
        *("--speculative-algorithm", "ngram"),
    ]
    with serving(*flags) as server:
        yield World(server, home / "roots", references, texts)
    torch.set_num_threads(threads)


@pytest.fixture
async def http(world: World) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with every adapter loaded."""
    async with aiohttp.ClientSession(world.server.url) as session:
        await world.server.ready(session)
        for name in NAMES:
            body = {"lora_name": name, "lora_path": str(world.roots / name)}
            status, answer = await post(session, "/load_lora_adapter", body)
            assert status == 200 or "loaded already" in answer["error"]["message"]
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json(content_type=None)


async def complete(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[list[int]]:
    """Token ids of each choice of a completion or, with `messages`, of a chat, streamed or not."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with http.post(path, json=GREEDY | body) as answer:
        if not body.get("stream"):
            found = await answer.json()
            assert answer.status == 200, found
            return [choice["token_ids"] for choice in found["choices"]]
        return await streamed_ids(answer)


async def streamed_ids(answer: aiohttp.ClientResponse) -> list[list[int]]:
    """Token ids of each choice of a stream."""
    events = await read_events(answer)
    assert events.pop() == "[DONE]"
    ids: dict[int, list[int]] = {}
    for event in events:
        for choice in event["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return [ids[index] for index in sorted(ids)]


def chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


async def test_every_adapter_says_what_merged_weights_say(world: World, http: aiohttp.ClientSession) -> None:
    """Selected in every way, through both routes, streamed and not, beside the base model, twice: the second
    time with prefixes in the cache."""
    for _ in range(2):
        bodies: list[tuple[str, int, dict[str, Any]]] = []
        for name in ("", *NAMES):
            ways = [{"model": name}, {"lora_path": name}, {"model": f"tiny:{name}"}] if name else [{}] * 3
            for at, prompt in enumerate(PROMPTS):
                completion = {"prompt": prompt}
                bodies.append((name, at, {**completion, **ways[0]}))
                bodies.append((name, at, {**completion, **ways[1], "stream": True}))
                bodies.append((name, at, {**chat(prompt), **ways[2]}))
                bodies.append((name, at, {**chat(prompt), **ways[0], "stream": True}))
        answers = await asyncio.gather(*(complete(http, body) for _, _, body in bodies))
        for (name, at, body), answer in zip(bodies, answers, strict=True):
            assert answer == [world.texts[name][at]], body


async def test_prompts_and_choices_of_one_request(world: World, http: aiohttp.ClientSession) -> None:
    answer = await complete(http, {"prompt": list(PROMPTS), "n": 2, "model": "c"})
    assert answer == [text for text in world.texts["c"] for _ in range(2)]
    names = ["d", None, "e"]
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": [PROMPTS[0]] * 3, "lora_path": names, "sampling_params": sampling}
    status, answers = await post(http, "/generate", body)
    assert status == 200, answers
    assert [each["output_ids"] for each in answers] == [world.texts[name or ""][0] for name in names]


async def test_grammars_mask_what_the_adapter_says(world: World, http: aiohttp.ClientSession) -> None:
    tokenizer = byte_level()
    digits = list(range(ord("0"), ord("9") + 1))
    wanted = []
    for model in world.references.values():
        ids = tokenizer.encode(PROMPTS[0]).ids
        text = ""
        for _ in range(6):
            last = tiny_model.logits(model, ids)[-1]
            ids = [*ids, max(digits, key=lambda id: float(last[id]))]
            text += chr(ids[-1])
        wanted.append(text)
    assert len(set(wanted)) > 1

    async def ask(name: str) -> str:
        body = {"prompt": PROMPTS[0], "lora_path": name or None, "regex": "[0-9]{6}"}
        status, answer = await post(http, "/v1/completions", {**GREEDY, **body, "ignore_eos": False})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    assert await asyncio.gather(*map(ask, world.references)) == wanted


async def test_adapters_are_listed_and_counted(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as answer:
        listed = (await answer.json())["data"]
    assert listed[0]["id"] == "tiny" and listed[0]["parent"] is None
    assert {each["id"]: each["parent"] for each in listed[1:]} == dict.fromkeys(NAMES, "tiny")
    async with http.get("/metrics") as answer:
        metrics = await answer.text()
    info = re.search(r"^vllm:lora_requests_info\{(.*)\} (.*)$", metrics, re.MULTILINE)
    assert info is not None and 'max_lora="2"' in info[1] and float(info[2]) > 0
    assert re.search(r"^loom_adapters_loaded(\{.*\})? 5\.0$", metrics, re.MULTILINE)


async def test_metrics_name_the_adapters_of_waiting_requests(
    world: World, http: aiohttp.ClientSession
) -> None:
    assert (await post(http, "/pause", {}))[0] == 200
    asked = asyncio.gather(*(complete(http, {"prompt": PROMPTS[0], "model": name}) for name in "dba"))
    async with asyncio.timeout(PATIENCE):
        metrics = ""
        while 'waiting_lora_adapters="a,b,d"' not in metrics:
            async with http.get("/metrics") as answer:
                metrics = await answer.text()
    assert 'running_lora_adapters=""' in metrics
    assert (await post(http, "/resume", {}))[0] == 200
    assert await asked == [[world.texts[name][0]] for name in "dba"]


async def test_loading_and_unloading_while_others_run(world: World, http: aiohttp.ClientSession) -> None:
    """One request that runs all the time keeps its text, and the place and memory come back each time."""
    stop = asyncio.Event()

    async def traffic() -> int:
        count = 0
        while not stop.is_set():
            texts = await asyncio.gather(
                *(
                    complete(http, {"prompt": PROMPTS[0], "lora_path": name or None})
                    for name in ("", "a", "c")
                )
            )
            assert texts == [[world.texts[name][0]] for name in ("", "a", "c")]
            count += 1
        return count

    running = asyncio.ensure_future(traffic())
    for turn in range(6):
        name = "de"[turn % 2]
        path = str(world.roots / name)
        prefix = "/v1" if turn % 2 else ""
        async with http.post(
            f"{prefix}/load_lora_adapter", json={"lora_name": "x", "lora_path": path}
        ) as answer:
            assert answer.status == 200
        assert await complete(http, {"prompt": PROMPTS[0], "model": "x"}) == [world.texts[name][0]]
        body = {"prompt": PROMPTS[0], "model": "x", "stream": True, "n": 2}
        async with http.post("/v1/completions", json=GREEDY | body) as streamed:
            async with http.post(f"{prefix}/unload_lora_adapter", json={"lora_name": "x"}) as answer:
                assert answer.status == 200
            assert await streamed_ids(streamed) == [world.texts[name][0]] * 2
        status, refused = await post(http, "/v1/completions", {"prompt": "x", "model": "x"})
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
    stop.set()
    assert await running > 0


async def test_what_is_refused_while_others_run(world: World, http: aiohttp.ClientSession) -> None:
    bad = world.roots / "bad"
    good = world.roots / "a"

    def file(name: str) -> str:
        return (good / name).read_text()

    config = json.loads(file("adapter_config.json"))
    weights = (good / "adapter_model.safetensors").read_bytes()
    cases: dict[str, tuple[dict[str, Any], bytes, dict[str, Any]]] = {
        "DoRA": ({"use_dora": True}, weights, {}),
        "bias": ({"bias": "lora_only"}, weights, {}),
        "modules_to_save": ({"modules_to_save": ["lm_head"]}, weights, {}),
        "rank 1, its adapter_config.json says 64": ({"r": 64}, weights, {}),
        "peft_type": ({"peft_type": "IA3"}, weights, {}),
        "adapter_model.safetensors": ({}, weights[: len(weights) // 2], {}),
        "adapter_config.json": ({"r": "many"}, weights, {}),
        "':'": ({}, weights, {"lora_name": "x:y"}),
        "outside of the directories": ({}, weights, {"lora_path": f"{bad}/../../merged-a"}),
        "loaded already": ({}, weights, {"lora_name": "a"}),
        "a name of the model": ({}, weights, {"lora_name": "tiny"}),
        "no directory": ({}, weights, {"lora_path": f"{bad}/none"}),
    }
    asked = asyncio.gather(*(complete(http, {"prompt": PROMPTS[1], "model": name}) for name in "abc"))
    for reason, (changes, content, body) in cases.items():
        bad.mkdir(exist_ok=True)
        (bad / "adapter_config.json").write_text(json.dumps(config | changes))
        (bad / "adapter_model.safetensors").write_bytes(content)
        status, answer = await post(
            http, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(bad), **body}
        )
        assert status == 400 and reason in answer["error"]["message"], (reason, answer)
    assert await asked == [[world.texts[name][1]] for name in "abc"]


async def test_files_that_are_gone_end_requests_of_their_adapter_alone(
    world: World, http: aiohttp.ClientSession
) -> None:
    """They are needed again once others have taken the adapter's host memory; when they are back, it runs."""
    path, away = world.roots / "x", world.roots.parent / "away"
    shutil.copytree(world.roots / "a", path)
    assert (await post(http, "/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)}))[0] == 200
    for name in "cde":
        await complete(http, {"prompt": PROMPTS[0], "model": name})
    path.rename(away)
    others = asyncio.gather(*(complete(http, {"prompt": PROMPTS[1], "model": name}) for name in "abc"))
    status, answer = await post(http, "/v1/completions", {"prompt": PROMPTS, "model": "x", "n": 2})
    assert status == 500 and "'x' cannot be run" in answer["error"]["message"], answer
    assert str(world.roots) not in str(answer)
    assert await others == [[world.texts[name][1]] for name in "abc"]
    away.rename(path)
    assert await complete(http, {"prompt": PROMPTS[0], "model": "x"}) == [world.texts["a"][0]]
    assert (await post(http, "/unload_lora_adapter", {"lora_name": "x"}))[0] == 200


async def test_adapters_outlive_sleep_and_new_weights(world: World, http: aiohttp.ClientSession) -> None:
    async def ask() -> list[list[list[int]]]:
        return await asyncio.gather(
            *(complete(http, {"prompt": PROMPTS[0], "lora_path": name or None}) for name in world.texts)
        )

    wanted = [[texts[0]] for texts in world.texts.values()]
    assert (await post(http, "/sleep", {}))[0] == 200
    waiting = asyncio.ensure_future(ask())
    status, _ = await post(
        http, "/load_lora_adapter", {"lora_name": "x", "lora_path": str(world.roots / "a")}
    )
    assert status == 200
    assert (await post(http, "/unload_lora_adapter", {"lora_name": "x"}))[0] == 200
    assert (await post(http, "/wake_up", {}))[0] == 200
    assert await waiting == wanted
    path = str(world.roots.parent / "tiny")
    assert (await post(http, "/update_weights_from_disk", {"model_path": path}))[0] == 200
    assert await ask() == wanted
