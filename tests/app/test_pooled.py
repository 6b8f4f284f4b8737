"""The real engine over tiny checkpoints: the same numbers as transformers', through every layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from app.api.pooling.rerank import Pair, PairBody, RerankBody, score_pairs, scored
from app.offline import LLM
from core.errors import ConfigError, ContextExceeded, RequestError
from tests.rigs import tiny_model
from tests.rigs.tiny_model import Tiny

PROMPTS = [
    [int(i * k % 250) + 3 for i in range(n)] for k, n in ((7, 40), (11, 3), (13, 90), (17, 40), (19, 1))
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Loads each architecture once."""
    live: dict[str, tuple[Tiny, LLM]] = {}

    def open_(name: str) -> tuple[Tiny, LLM]:
        if name not in live:
            make = tiny_model.build_headless if name in tiny_model.HEADLESS else tiny_model.build
            tiny = make(name, tmp_path_factory.mktemp(name))
            bytes_as_tokens(tiny.path, segments="Roberta" not in name)
            live[name] = (
                tiny,
                LLM(str(tiny.path), device="cpu", kv_tokens=2048, step_tokens=128, context_length=128),
            )
        return live[name]

    yield open_
    for _, llm in live.values():
        llm.close()


def bytes_as_tokens(path: Path, segments: bool = True) -> None:
    """A tokenizer whose ids are bytes. Without `segments` it joins pairs as RoBERTa's does, as one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if segments:
        core.post_processor = processors.TemplateProcessing("$A", "$A $B:1", [])
    else:
        core.post_processor = processors.RobertaProcessing((alphabet[5], 5), (alphabet[6], 6))
    core.save(str(path / "tokenizer.json"))


@torch.no_grad()
def states(tiny: Tiny, prompt: list[int]) -> np.ndarray:
    base = getattr(tiny.reference, "model", tiny.reference)
    return base(torch.tensor([prompt])).last_hidden_state[0].numpy()


@torch.no_grad()
def logits(tiny: Tiny, prompt: list[int], **more: Any) -> np.ndarray:
    return tiny.reference(torch.tensor([prompt]), **more).logits[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("name", ["llama", "Qwen3Model"])
def test_decoders_embed_with_their_last_token(opened: Any, name: str) -> None:
    tiny, llm = opened(name)
    for got, prompt in zip(llm.embed(PROMPTS), PROMPTS, strict=True):
        np.testing.assert_allclose(got, unit(states(tiny, prompt)[-1]), atol=1e-4)


def test_encoders_embed_with_their_mean(opened: Any) -> None:
    tiny, llm = opened("BertModel")
    for got, prompt in zip(llm.embed(PROMPTS), PROMPTS, strict=True):
        np.testing.assert_allclose(got, unit(states(tiny, prompt).mean(0)), atol=1e-4)
    assert llm._live.loaded.engine.statistics()[0].scheduler.cache.cached == 0


def test_a_prefix_that_others_left_changes_nothing(opened: Any) -> None:
    _, llm = opened("llama")
    longer = PROMPTS[2] + [5, 6, 7]
    first = llm.embed([PROMPTS[2]])[0]
    llm.embed([longer])
    hits = llm._live.loaded.engine.statistics()[0].scheduler.cache.hit_tokens
    np.testing.assert_allclose(llm.embed([PROMPTS[2]])[0], first, atol=1e-5)
    assert llm._live.loaded.engine.statistics()[0].scheduler.cache.hit_tokens > hits


def test_many_at_once_are_each_their_own(opened: Any) -> None:
    _, llm = opened("BertModel")
    many = [[i % 250 + 3, *PROMPTS[i % 5][:30]] for i in range(256)]
    together = llm.embed(many)
    for i in (0, 77, 255):
        np.testing.assert_allclose(together[i], llm.embed([many[i]])[0], atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen2ForSequenceClassification", "RobertaForSequenceClassification"])
def test_classes(opened: Any, name: str) -> None:
    tiny, llm = opened(name)
    for got, prompt in zip(llm.classify(PROMPTS), PROMPTS, strict=True):
        want = torch.softmax(torch.tensor(logits(tiny, prompt)), -1).numpy()
        np.testing.assert_allclose(got["probs"], want, atol=1e-4)
        assert (got["label"], got["num_classes"]) == (f"LABEL_{int(want.argmax())}", 3)


def test_rewards_are_told_raw(opened: Any) -> None:
    tiny, llm = opened("LlamaForSequenceClassification")
    for prompt, got in zip(PROMPTS, llm.classify(PROMPTS, use_activation=False), strict=True):
        np.testing.assert_allclose(got["probs"], logits(tiny, prompt), atol=1e-3)


def test_pairs_are_two_segments(opened: Any) -> None:
    tiny, llm = opened("BertForSequenceClassification")
    one, two = "a question", "an answer"
    body = PairBody(text_1=one, text_2=two, use_activation=False)
    answer: Any = llm._wait(score_pairs(body, llm._live.loaded))
    ids, *_ = llm._wait(llm._live.loaded.tokenizer.encode_pair_async((one, two), ("a", "b")))
    types = torch.tensor([[0] * len(one) + [1] * len(two)])
    assert len(ids) == len(one) + len(two)
    np.testing.assert_allclose(
        answer["data"][0]["score"], logits(tiny, ids.tolist(), token_type_ids=types)[0], atol=1e-3
    )


def test_a_pair_is_one_segment_where_the_tokenizer_knows_no_second(opened: Any) -> None:
    tiny, llm = opened("XLMRobertaForSequenceClassification")
    assert tiny.reference.config.type_vocab_size == 2
    texts, names = ("a question", "an answer"), ("query", "documents")
    (got,), _ = llm._wait(scored([Pair(texts, names)], RerankBody(use_activation=False), llm._live.loaded))
    ids, second, segments = llm._wait(llm._live.loaded.tokenizer.encode_pair_async(texts, names))
    assert (len(ids), second, segments) == (1 + 10 + 2 + 9 + 1, 1 + 10 + 2, False)
    assert got == pytest.approx(logits(tiny, ids.tolist())[0], abs=1e-3)


def test_a_document_is_cut_to_its_tokens_without_special_ones_too(opened: Any) -> None:
    _, llm = opened("BertForSequenceClassification")
    pairs = [Pair(("abc", document), ("query", "documents")) for document in ("wxyz", "wx")]
    scores, pooled = llm._wait(scored(pairs, RerankBody(), llm._live.loaded, most=2))
    assert pooled.prompt_tokens == 2 * (3 + 2)
    assert scores[0] == pytest.approx(scores[1])


def test_hidden_states_come_through_every_layer(opened: Any) -> None:
    tiny, llm = opened("llama")
    prompt = PROMPTS[2]
    made = llm.generate([prompt], max_tokens=4, temperature=0, ignore_eos=True)[0].token_ids
    asked = {
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_hidden_states": True,
    }
    answer: Any = llm.submit("/v1/completions", msgspec.json.encode(asked)).result()
    want = states(tiny, prompt + made[:-1])[-1]
    np.testing.assert_allclose(answer["choices"][0]["hidden_states"], want, atol=1e-3)


def test_what_is_not_theirs_is_refused(opened: Any) -> None:
    _, bert = opened("BertModel")
    for ask in (lambda: bert.generate("a"), lambda: next(bert.stream("a")), lambda: bert.classify("a")):
        with pytest.raises(RequestError) as error:
            ask()
        assert error.value.code == "unsupported_model"
    with pytest.raises(ContextExceeded) as long:
        bert.embed([[3], [3] * 129])
    assert long.value.param == "input[1]"
    assert len(bert.embed([[3] * 129], truncate_prompt_tokens=-1)) == 1


def test_an_encoder_reads_what_one_step_takes(opened: Any) -> None:
    tiny, _ = opened("BertModel")
    with LLM(str(tiny.path), device="cpu", step_tokens=64) as llm:
        assert len(llm.embed([[3] * 64, [4] * 64])) == 2
        with pytest.raises(ContextExceeded, match="64 tokens"):
            llm.embed([[3] * 65])


def test_an_unknown_architecture_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["T5EncoderModel"]}')
    with pytest.raises(ConfigError, match=r"T5EncoderModel is not supported; the nearest that is: "):
        LLM(str(tmp_path), device="cpu", load_format="dummy")
