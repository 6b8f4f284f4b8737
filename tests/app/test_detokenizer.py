"""Pieces add up to the whole text, and no piece ends inside a character."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers

from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer
from tests.rigs import vocabularies
from tests.rigs.assets import real_tokenizer

TEXT = "hello hello 👨‍👩‍👧🙂 日本語, привет é ﷺ\n\n  tab\tend 1234 the\u2028end"


def pieces(
    tokenizer: Tokenizer, ids: list[int], tail: list[int], skip: bool = True, size: int = 1
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tail, skip)
    out = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*out, detokenizer.finish()]


@pytest.fixture(params=[vocabularies.byte_level, vocabularies.byte_fallback, vocabularies.word_pieces])
def small(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], tokenizers.Tokenizer] = request.param
    return Tokenizer(make(), {})


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_add_up(small: Tokenizer, skip: bool) -> None:
    draw = random.Random(3)
    for _ in range(150):
        ids = [draw.randrange(small.vocab_size) for _ in range(40)]
        size = draw.choice([1, 1, 2, 7])
        assert "".join(pieces(small, ids, [], skip, size)) == small.decode(ids, skip)


def test_text_adds_up_and_characters_stay_whole() -> None:
    for make in (vocabularies.byte_level, vocabularies.byte_fallback):
        tokenizer = Tokenizer(make(), {})
        ids = tokenizer.encode(TEXT, add_special=False).tolist()
        out = pieces(tokenizer, ids, [])
        assert "".join(out) == TEXT
        assert not any("\ufffd" in piece for piece in out)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = Tokenizer(vocabularies.byte_fallback(), {})
    ids = [3 + byte for byte in "🙂日".encode()]
    assert pieces(tokenizer, ids, [5]) == ["", "", "", "🙂", "", "", "日", ""]


def test_half_a_character_is_replaced_at_the_end_only() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    out = pieces(tokenizer, list("🙂".encode()[:3]), [])
    assert out == ["", "", "", "\ufffd"]


def test_invalid_bytes_are_replaced_once_they_are_certain() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    assert pieces(tokenizer, [0xF0, ord("a"), 0x80, ord("b")], []) == ["", "\ufffda", "\ufffd", "b", ""]


def test_the_prompt_may_end_inside_a_character() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    first, *rest = "é".encode()
    assert pieces(tokenizer, [*rest, ord("!")], [ord("x"), first]) == ["é", "!", ""]


def test_a_leading_space_is_dropped_at_the_start_of_a_text_only() -> None:
    tokenizer = Tokenizer(vocabularies.byte_fallback(), {})
    ids = tokenizer.encode("a b", add_special=False).tolist()
    assert "".join(pieces(tokenizer, ids, [1])) == "a b"  # after BOS, which is not shown
    assert "".join(pieces(tokenizer, ids, [1, *ids])) == " a b"
    assert "".join(pieces(tokenizer, ids, [1], skip=False)) == " a b"


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level(), {})
    ids = tokenizer.encode("<|im_start|>hello<think>two words<｜日本｜><|im_end|>").tolist()
    assert "".join(pieces(tokenizer, ids, [])) == "hello<think>two words"
    shown = "<|im_start|>hello<think>two words<｜日本｜><|im_end|>"
    assert "".join(pieces(tokenizer, ids, [], skip=False)) == shown


def test_ids_outside_the_vocabulary_read_as_nothing(small: Tokenizer) -> None:
    ids = [3, 10_000, 4]
    assert "".join(pieces(small, ids, [])) == small.decode([3, 4])


def test_context_decides_where_tokens_are_no_table() -> None:
    tokenizer = Tokenizer(vocabularies.word_pieces(), {})
    ids = tokenizer.encode("unhappy and happy.").tolist()
    assert "".join(pieces(tokenizer, ids, [6])) == " unhappy and happy ."
    assert "".join(pieces(tokenizer, [5] * 200 + ids, [6])) == " unhappy and happy ."


@pytest.mark.parametrize(
    "name", ["tokenizers/qwen3", "tokenizers/llama3_1", "tokenizers/deepseek_v3", "models/stories260K"]
)
def test_real_vocabularies(name: str) -> None:
    tokenizer = real_tokenizer(name)
    draw = random.Random(1)
    texts = [tokenizer.encode(TEXT * 3, add_special=False).tolist()]
    texts += [[draw.randrange(tokenizer.vocab_size) for _ in range(300)] for _ in range(20)]
    for ids in texts:
        for skip in (True, False):
            assert "".join(pieces(tokenizer, ids, [], skip)) == tokenizer.decode(ids, skip)
    assert tokenizer.decode(texts[0]) == TEXT * 3
