"""Text insertion: the marks of a vocabulary, where they go, and what `suffix` makes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from app.engine.job import Job
from app.engine.submit import encoded
from app.text.infill import FIM_FORMATS, find_marks
from app.text.tokenizer import Tokenizer
from core.errors import RequestError
from tests.rigs.assets import real_tokenizer
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD, Server, Start
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.tokenizer import BOS, ByteTokenizer, JoinTemplate
from tests.rigs.vocabularies import byte_fallback, save

P, S, M, E = 258, 259, 260, 261


async def joined(marks: dict[str, int], special: bool = True) -> str:
    """A prompt `ab` with the suffix `yz`, marks as one letter each."""
    job = Job(id="a", prompt="ab", suffix="yz", add_special_tokens=special)
    names = {BOS: "B", P: "P", S: "S", M: "M", E: "E"}
    ids = await encoded(job, ByteTokenizer(marks))
    return "".join(names.get(id) or chr(id) for id in ids.tolist())


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"<|fim_prefix|>": P, "<|fim_suffix|>": S, "<|fim_middle|>": M}, "BPabSyzM"),
        ({"<fim_prefix>": P, "<fim_suffix>": S, "<fim_middle>": M}, "BPabSyzM"),
        ({"<fim-prefix>": P, "<fim-suffix>": S, "<fim-middle>": M}, "BPabSyzM"),
        ({"<｜fim▁begin｜>": P, "<｜fim▁hole｜>": S, "<｜fim▁end｜>": M}, "BPabSyzM"),
        ({"▁<PRE>": P, "▁<SUF>": S, "▁<MID>": M, "▁<EOT>": E}, "BPabSyzM"),
        ({"<|code_prefix|>": P, "<|code_suffix|>": S, "<|code_middle|>": M}, "BPabSyzM"),
        ({"[PREFIX]": P, "[SUFFIX]": S}, "BSyzPab"),
        ({"[PREFIX]": P, "[SUFFIX]": S, "[MIDDLE]": M}, "BSyzPab"),
        ({"<[fim-prefix]>": P, "<[fim-suffix]>": S, "<[fim-middle]>": M}, "BSyzPabM"),
    ],
)
async def test_parts_and_marks_stand_as_each_family_wants_them(marks: dict[str, int], expected: str) -> None:
    assert await joined(marks) == expected
    assert await joined(marks, special=False) == expected[1:]


def test_half_of_the_marks_are_none() -> None:
    for family in FIM_FORMATS:
        assert find_marks(ByteTokenizer({family.prefix: P})) is None
        if family.middle:
            assert find_marks(ByteTokenizer({family.prefix: P, family.suffix: S})) is None


def test_marks_and_the_family_s_own_end_say_that_it_is_complete() -> None:
    words = ByteTokenizer({"▁<PRE>": P, "▁<SUF>": S, "▁<MID>": M, "▁<EOT>": E, "<file_sep>": 5})
    marks = find_marks(words)
    assert marks is not None and marks.ends == {P, S, M, E}


async def test_a_suffix_gets_no_space_of_its_own(tmp_path: Path) -> None:
    """Tokenizers of sentencepiece put one before every text."""
    core = byte_fallback()
    core.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    words = Tokenizer.load(save(core, tmp_path), core.get_vocab_size())
    job = Job(id="a", prompt="a", suffix="b", add_special_tokens=False)
    ids = (await encoded(job, words)).tolist()
    marks = find_marks(words)
    assert marks is not None and ids[0] == marks.prefix and ids[-1] == marks.middle
    after = ids[ids.index(marks.suffix) + 1 : -1]
    assert b"".join(map(words.token_bytes, after)) == b"b"
    words.close()


@pytest.mark.parametrize(("name", "there"), [("qwen3", True), ("deepseek_v3", True), ("llama3_1", False)])
async def test_vocabularies_of_models(name: str, there: bool) -> None:
    words = real_tokenizer(f"tokenizers/{name}")
    job = Job(id="a", prompt="def f(", suffix="return 1", add_special_tokens=False)
    if there:
        text = words.decode((await encoded(job, words)).tolist(), skip_special=False)
        assert text.index("def f(") < text.index("return 1") and text.endswith(">")
    else:
        with pytest.raises(RequestError, match="no marks"):
            await encoded(job, words)


# -- through HTTP ----------------------------------------------------------------------------------

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def real(start: Start) -> AsyncIterator[tuple[Server, Bench]]:
    """A vocabulary of bytes with Codestral's marks, over a fake device."""
    server = await start()
    core = Tokenizer.load(None, VOCAB - 2, [2])._core
    core.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("[PREFIX]", "[SUFFIX]")])
    words = Tokenizer(core, {}, [2])
    bench = Bench(words)
    card = msgspec.structs.replace(CARD, vocab_size=VOCAB)
    server.service.ready(make_loaded(card, words, JoinTemplate(), bench.submitter))
    yield server, bench
    bench.engine.close()
    words.close()


async def test_an_answer_goes_between(real: tuple[Server, Bench]) -> None:
    server, _ = real
    words: Any = server.service.loaded.tokenizer
    p, s = words.token_id("[PREFIX]"), words.token_id("[SUFFIX]")
    body = {"prompt": "ab", "suffix": "yz", "max_tokens": 3, "echo": True, "return_token_ids": True}
    answer = await server.ask(COMPLETIONS, body)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [s, *b"yz", p, *b"ab"]
    assert choice["text"].startswith("ab") and answer["usage"]["prompt_tokens"] == 6
    (told,) = (await server.post(COMPLETIONS + "/render", body))[1]
    assert told["token_ids"] == choice["prompt_token_ids"]
    assert {p, s} <= set(told["sampling_params"]["stop_token_ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 6]}, "suffix"),
        ({"prompt": [[5], [6]]}, "suffix"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"suffix": 5}, "suffix"),
    ],
)
async def test_what_a_suffix_cannot_stand_beside(
    real: tuple[Server, Bench], fields: dict[str, Any], param: str
) -> None:
    server, bench = real
    assert (await server.refused(COMPLETIONS, {"prompt": "a", "suffix": "b", **fields}))["param"] == param
    assert not bench.executor.plans


async def test_without_marks_it_is_refused(server: Server) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert (status, answer["error"]["param"]) == (400, "suffix")
    assert "no marks" in answer["error"]["message"] and not server.engine.runs
