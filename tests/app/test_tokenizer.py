"""Ids, special tokens and bytes of a vocabulary; encoding off the loop."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.text.tokenizer import HUGE_CHARS, INLINE_CHARS, Tokenizer
from core.errors import ContextExceeded, ModelError, RequestError
from core.types import Ints
from tests.rigs import vocabularies
from tests.rigs.assets import real_tokenizer
from tests.rigs.wait import PATIENCE


def test_a_directory_is_read_with_its_special_tokens(tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "add_bos_token": False}
    path = vocabularies.save(vocabularies.byte_level(), tmp_path, **settings)
    tokenizer = Tokenizer.load(path, 300, eos_ids=[7, 299, 300])
    start, end = tokenizer.bos_id, tokenizer.encode("<|im_end|>").tolist()[0]
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert tokenizer.eos_ids == {7, 299, end}  # 300 is no id of the model
    assert Tokenizer.load(path, end, eos_ids=[7, end]).eos_ids == {7}  # nor is that of <|im_end|> here
    assert start in tokenizer.special_ids and len(tokenizer.special_ids) == 3
    assert tokenizer.encode("hello").tolist()[-1] == tokenizer.vocab_size - 7
    assert tokenizer.encode("hello").dtype.name == "int32"


def test_bos_is_added_where_only_the_settings_ask_for_it(tmp_path: Path) -> None:
    path = vocabularies.save(
        vocabularies.byte_level(), tmp_path, bos_token="<|im_start|>", add_bos_token=True
    )
    tokenizer = Tokenizer.load(path, 300)
    assert tokenizer.encode("a").tolist() == [tokenizer.bos_id, ord("a")]
    assert tokenizer.encode("a", add_special=False).tolist() == [ord("a")]


def test_ids_of_a_long_text_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(vocabularies.save(vocabularies.byte_level(), tmp_path), 300)
    text = "abcdefg" * 10
    whole = tokenizer.encode(text)
    for size in (1, 9, 23, 69, 70):
        monkeypatch.setattr("app.text.tokenizer.AT_ONCE", size)
        found = tokenizer.encode(text)
        assert found.dtype == whole.dtype and found.tolist() == whole.tolist()


async def test_offsets_are_of_the_same_tokens(tmp_path: Path) -> None:
    path = vocabularies.save(
        vocabularies.byte_level(), tmp_path, bos_token="<|im_start|>", add_bos_token=True
    )
    tokenizer = Tokenizer.load(path, 300)
    for text in ("hello ä<|im_end|>b", "hello ä<|im_end|>b " * INLINE_CHARS):
        for special in (True, False):
            found = await tokenizer.offsets_async(text, special)
            assert len(found) == len(tokenizer.encode(text, special))
            assert (found[0] == (0, 0)) is special
            assert found[-1][1] == len(text)
            assert next(text[a:b] for a, b in found[special:]) == "hello"


def test_bos_is_not_added_twice(tmp_path: Path) -> None:
    path = vocabularies.save(vocabularies.byte_fallback(), tmp_path, bos_token="<s>", add_bos_token=True)
    tokenizer = Tokenizer.load(path, 300)
    assert tokenizer.encode("a").tolist().count(1) == 1


def test_tokens_that_only_the_settings_name_are_added(tmp_path: Path) -> None:
    core = vocabularies.byte_level()
    size = core.get_vocab_size()
    entry = {"content": "<|eot_id|>", "special": True}
    path = vocabularies.save(core, tmp_path / "good", added_tokens_decoder={str(size): entry})
    tokenizer = Tokenizer.load(path, 300)
    assert tokenizer.encode("<|eot_id|>").tolist() == [size]
    assert size in tokenizer.eos_ids
    path = vocabularies.save(core, tmp_path / "bad", added_tokens_decoder={"999": entry})
    with pytest.raises(ModelError, match="999"):
        Tokenizer.load(path, 300)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}'])
def test_an_unreadable_tokenizer_says_which(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, 300)


def test_settings_must_be_an_object(tmp_path: Path) -> None:
    vocabularies.save(vocabularies.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path, 300)


def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text() -> None:
    text = "hello 🙂 é\n"
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    ids = tokenizer.encode(text).tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_text(0xF0) == "\ufffd"
    assert tokenizer.token_bytes(10_000) == tokenizer.token_bytes(-1) == b""
    assert [tokenizer.token_name(token) for token in tokenizer.encode(" \n").tolist()] == ["Ġ", "Ċ"]
    assert tokenizer.token_name(10_000) == ""
    tokenizer = Tokenizer(vocabularies.byte_fallback(), {})
    ids = tokenizer.encode(text, add_special=False).tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + text.encode()
    token = tokenizer.encode("a", add_special=False).tolist()[0]
    assert (tokenizer.token_text(token), tokenizer.token_name(token)) == (" a", "▁a")
    assert Tokenizer(vocabularies.word_pieces(), {}).token_bytes(3) == b"happy"


def test_invalid_bytes_are_replaced_one_by_one_in_byte_fallback() -> None:
    tokenizer = Tokenizer(vocabularies.byte_fallback(), {})
    ids = [3 + byte for byte in b"a\xe6\x97\xe6\x97\xa5\x80"]
    assert tokenizer.decode([1, *ids]) == "a\ufffd\ufffd日\ufffd"


@pytest.mark.parametrize("text", ["\ud800", "fine, then \udfff", "x" * 5_000 + "\ud800"])
async def test_lone_surrogates_name_the_field(text: str) -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    with pytest.raises(RequestError, match="surrogate") as caught:
        await tokenizer.encode_async(text, param="messages")
    assert caught.value.param == "messages"
    tokenizer.close()


async def test_long_texts_encode_alike_in_pool_threads() -> None:
    core = vocabularies.byte_level()
    tokenizer = Tokenizer(core, {"bos_token": "<|im_start|>", "add_bos_token": True})
    texts = [f"hello <|im_end|>{i} two words 🙂 " * 100 for i in range(20)]
    assert all(len(text) > INLINE_CHARS for text in texts)
    encoding = asyncio.gather(*map(tokenizer.encode_async, texts))
    while not encoding.done():  # the loop reads the same tokenizer meanwhile
        assert tokenizer.decode(tokenizer.encode("hello two")) == "hello two"
        assert tokenizer.token_id("<|im_end|>") is not None and tokenizer.token_name(0)
        await asyncio.sleep(0)
    apart = await encoding
    assert [ids.tolist() for ids in apart] == [tokenizer.encode(text).tolist() for text in texts]
    tokenizer.close()


async def test_a_text_that_is_far_too_long_is_refused_by_its_beginning() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    with pytest.raises(ContextExceeded, match=r"is 1000 tokens.*at least 4000 tokens") as caught:
        await tokenizer.encode_async("x" * 1_000_000, param="messages", most=1_000)
    assert caught.value.param == "messages"
    tokenizer.close()


async def test_closing_waits_for_no_text_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    begun, gate, encode = threading.Semaphore(0), threading.Event(), tokenizer._encode
    monkeypatch.setattr(
        Tokenizer,
        "_encode",
        lambda self, *given: (begun.release(), gate.wait(PATIENCE), encode(*given))[-1],
    )
    texts = [asyncio.ensure_future(tokenizer.encode_async("x" * (HUGE_CHARS + 1))) for _ in range(5)]
    await asyncio.sleep(0)
    assert begun.acquire(timeout=PATIENCE)
    closing = asyncio.ensure_future(asyncio.to_thread(tokenizer.close))
    _, waiting = await asyncio.wait(texts[1:], timeout=PATIENCE)
    assert not waiting and all(text.cancelled() for text in texts[1:])
    gate.set()
    await closing
    assert len(await texts[0]) == HUGE_CHARS + 1


FRAGMENTS = (
    " ",
    "\n",
    "a",
    "1",
    "word ",
    "antidisestablishmentarianism ",
    "é",
    "e\u0301",
    "🙂",
    "漢字",
    "{}",
    "ﬁ",
)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3_1", "qwen3"])
async def test_a_text_that_fits_is_not_refused_by_its_beginning(name: str) -> None:
    tokenizer = real_tokenizer(f"tokenizers/{name}")
    rng = random.Random(3)
    for _ in range(25):
        fragments = rng.sample(FRAGMENTS, rng.randrange(1, 4))
        text = "".join(rng.choice(fragments) * rng.randrange(1, 200) for _ in range(rng.randrange(20, 60)))
        ids = tokenizer.encode(text, add_special=False)
        found = await tokenizer.encode_async(text, add_special=False, most=len(ids))
        assert found.tolist() == ids.tolist(), fragments


async def test_a_huge_text_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are more than there are threads for prompts that are only long."""
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    gate = threading.Event()
    encode = tokenizer._encode

    def held(text: str, add_special: bool) -> Ints:
        assert len(text) <= HUGE_CHARS or gate.wait(PATIENCE)
        return encode(text, add_special)

    monkeypatch.setattr(Tokenizer, "_encode", lambda self, *given: held(*given))
    huge = [asyncio.ensure_future(tokenizer.encode_async("x" * (HUGE_CHARS + 1))) for _ in range(3)]
    async with asyncio.timeout(PATIENCE):
        assert len(await tokenizer.encode_async("x" * HUGE_CHARS)) == HUGE_CHARS
    assert not any(one.done() for one in huge)
    gate.set()
    assert [len(ids) for ids in await asyncio.gather(*huge)] == [HUGE_CHARS + 1] * 3
    tokenizer.close()


@pytest.mark.parametrize("size", [10, 256, 1_000])
def test_without_a_tokenizer_bytes_are_tokens(size: int) -> None:
    tokenizer = Tokenizer.load(None, size, eos_ids=[2])
    assert tokenizer.vocab_size == size
    assert tokenizer.eos_ids == {2}
    texts = [tokenizer.decode([token]) for token in range(256, size)]
    assert len(set(texts)) == len(texts)
    if size >= 256:
        assert tokenizer.decode(tokenizer.encode("hello 🙂 é")) == "hello 🙂 é"
        assert tokenizer.encode("<300>").max() < 256


def test_importing_it_is_light() -> None:
    heavy = "{'torch', 'transformers', 'gguf', 'huggingface_hub', 'jinja2', 'aiohttp'}"
    script = "import sys, app.text.tokenizer, app.text.detokenizer, app.checkpoint.checkpoint\n"
    script += f"assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("name", "eos", "bos"),
    [
        ("tokenizers/qwen3", {151645}, None),
        ("tokenizers/llama3_1", {128009}, 128000),
        ("tokenizers/deepseek_v3", {1}, 0),
        ("models/stories260K", {2}, 1),
    ],
)
async def test_real_vocabularies(name: str, eos: set[int], bos: int | None) -> None:
    tokenizer = real_tokenizer(name)
    assert tokenizer.eos_ids == eos
    assert tokenizer.bos_id == bos
    text = "It's 12,345 日本語 🙂 <|im_end|>\n" * 40
    ids = tokenizer.encode(text)
    assert (await tokenizer.encode_async(text)).tolist() == ids.tolist()
    assert (ids[0] == bos) == (bos is not None)
    body = tokenizer.encode(text, add_special=False).tolist()
    assert b"".join(map(tokenizer.token_bytes, body)).removeprefix(b" ") == text.encode()
    json.dumps([tokenizer.token_text(token) for token in body])
