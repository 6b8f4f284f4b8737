"""Adapters in `app.offline.LLM`, over a tiny model with random weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.offline import LLM, LoRARequest
from bench.chaos.tiny import dummy_model
from core.adapters import TARGETS
from core.errors import ConfigError, NotFound, RequestError
from tests.rigs import lora

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
HI = [{"role": "user", "content": "hi"}]
NAMES = "abcd"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("offline")
    model = dummy_model(home / "model")
    for seed, name in enumerate(NAMES, 1):
        lora.save(lora.adapter_for(model, TARGETS, seed=seed), home / name)
    return home


def opened(home: Path, **settings: Any) -> LLM:
    model = home / "model"
    template = str(model / "template.jinja")
    known: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "kv_tokens": 4096}
    return LLM(str(model), chat_template=template, **known, **settings)


@pytest.fixture
def llm(home: Path) -> Iterator[LLM]:
    """An `LLM` with `a`, and room for two on the device and three in host memory; in the peers' words."""
    settings: dict[str, Any] = {"max_loras": 2, "max_cpu_loras": 3, "lora_target_modules": ["all"]}
    with opened(home, enable_lora=True, lora_paths=[f"a={home / 'a'}"], **settings) as loaded:
        limits = loaded._live.replicas.capabilities.adapters
        assert limits is not None and (limits.places, limits.host) == (2, 3)
        yield loaded


def request(home: Path, name: str) -> LoRARequest:
    return LoRARequest(name, 1, str(home / name))


def test_each_prompt_may_have_its_own(llm: LLM, home: Path) -> None:
    """One by one, together, as messages and as a stream, named in each way: the same tokens."""
    each = [None, *(request(home, name) for name in NAMES)]
    alone = [llm.generate("hello", GREEDY, lora_request=adapter)[0].token_ids for adapter in each]
    assert len({str(tokens) for tokens in alone}) == len(each)
    outputs = llm.generate(["hello"] * 10, GREEDY, lora_request=each * 2)
    assert [output.token_ids for output in outputs] == alone * 2
    ways: list[dict[str, Any]] = [{"lora_path": "a"}, {"model": "a"}, {"model": "model:a"}]
    for fields in ways:
        assert llm.generate("hello", GREEDY, **fields)[0].token_ids == alone[1]
        pieces = llm.stream("hello", GREEDY, **fields)
        assert [token for piece in pieces for token in piece.token_ids] == alone[1]
    pieces = llm.stream("hello", GREEDY, lora_request=each[2])
    assert [token for piece in pieces for token in piece.token_ids] == alone[2]
    chats = llm.chat([HI, HI], GREEDY, lora_request=[None, each[3]])
    assert chats[0].text == llm.chat(HI, GREEDY)[0].text != chats[1].text
    with pytest.raises(TypeError, match="2 adapters for 1 prompts"):
        llm.generate("hello", lora_request=each[:2])


async def test_async_twins(llm: LLM, home: Path) -> None:
    adapter = request(home, "b")
    (output,) = await llm.agenerate("hello", GREEDY, lora_request=adapter)
    pieces = [piece async for piece in llm.astream("hello", GREEDY, lora_request=adapter)]
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert await llm.achat(HI, GREEDY, lora_request=adapter)


def test_a_request_loads_its_adapter_once(llm: LLM, home: Path) -> None:
    """The adapter is loaded once also where two threads bring it at the same time."""
    with ThreadPoolExecutor(4) as pool:
        adapter = request(home, "b")
        answers = list(pool.map(lambda _: llm.generate("x", GREEDY, lora_request=adapter), range(8)))
    assert len({str(output.token_ids) for (output,) in answers}) == 1
    with pytest.raises(RequestError, match="'b', which was loaded from") as error:
        llm.generate("x", lora_request=LoRARequest("b", 2, str(home / "c")))
    assert error.value.param == "lora_request"


def test_loading_and_unloading(llm: LLM, home: Path) -> None:
    llm.load_lora_adapter("x", str(home / "b"), pinned=True)
    first = llm.generate("hello", GREEDY, lora_path="x")[0].token_ids
    with pytest.raises(RequestError, match="loaded already"):
        llm.load_lora_adapter("x", str(home / "c"))
    llm.unload_lora_adapter("x")
    with pytest.raises(RequestError, match="no loaded adapter"):
        llm.generate("hello", lora_path="x")
    with pytest.raises(NotFound):
        llm.unload_lora_adapter("x")
    llm.load_lora_adapter("x", str(home / "c"))
    assert llm.generate("hello", GREEDY, lora_path="x")[0].token_ids != first


def test_what_cannot_be_served_is_an_error_of_its_own(llm: LLM, home: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(home / "b", bad)
    (bad / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(RequestError, match="refused"):
        llm.load_lora_adapter("bad", str(bad))
    with pytest.raises(RequestError, match="refused"):
        llm.generate(["one", "two"], GREEDY, lora_request=[None, LoRARequest("bad", 1, str(bad))])
    assert llm.generate("hello", GREEDY, lora_path="a")


def test_a_start_with_a_bad_adapter_or_none(home: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(home / "b", bad)
    (bad / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--lora bad=.*adapter_model\.safetensors is missing"):
        opened(home, lora=(f"bad={bad}",))
    with opened(home) as plain, pytest.raises(RequestError, match="--enable-lora"):
        plain.load_lora_adapter("a", str(home / "a"))
