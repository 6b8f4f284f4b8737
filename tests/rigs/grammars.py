"""A small tokenizer for grammar tests, and random texts of a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken

from app.text.tokenizer import Tokenizer
from app.text.vocab import BYTE_ALPHABET
from core.grammar import CompiledGrammar, TokenTable
from core.plan import NewSlot, StepPlan
from core.request import SamplingParams
from gpu.grammar.matchers import Matchers
from gpu.grammar.stepper import Grammar, Matcher
from tests.rigs.arrays import ints

WIDTH = 300
"""Number of logits: more than the vocabulary, as in padded models."""
END, TURN, THINK, UNTHINK, TOOL = 264, 265, 266, 267, 268
WORDS = ('":', '","', '"}', "true", "abc", '{"', "  ", "12")
"""Tokens of several bytes, ids 256 to 263."""


def make_tokenizer() -> Tokenizer:
    """Bytes, a few words, two special end tokens, and three added tokens that are not special."""
    characters = {byte: chr(char) for char, byte in BYTE_ALPHABET.items()}
    vocab = {characters[byte]: byte for byte in range(256)}
    for i, word in enumerate(WORDS):
        vocab["".join(characters[byte] for byte in word.encode())] = 256 + i
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|turn|>", special=True)])
    core.add_tokens([AddedToken(text) for text in ("<think>", "</think>", "<tool>")])
    return Tokenizer(core, {}, [END, TURN])


TOKENIZER = make_tokenizer()


def table(width: int = WIDTH) -> TokenTable:
    return TOKENIZER.token_table(width)


def new_slot(
    slot: int, grammar: CompiledGrammar | None, output: Sequence[int] = (), drafts: bool = True
) -> NewSlot:
    return NewSlot(slot, SamplingParams(), ints([1]), ints(output), 0, grammar=grammar, drafts=drafts)


def decode(*slots: int) -> StepPlan:
    """A step with one decode row for each of `slots`."""
    return StepPlan(0, ints(slots))


def allowed(grammar: Grammar, prefix: Sequence[int] = ()) -> set[int]:
    """Tokens that may follow `prefix`."""
    matchers = Matchers()
    matchers.apply([new_slot(1, grammar, prefix)])
    masks = matchers.fill(decode(1))
    assert masks is not None
    return set(np.flatnonzero(np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")).tolist())


def accepts(grammar: Grammar, text: str | Sequence[int]) -> bool:
    """Whether the masks accept `text`, token by token, and then an end token."""
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    matcher: Matcher = grammar.matcher()
    bits = np.zeros((1, matcher.stepper.words), np.int32)
    for token in [*tokens, END]:
        matcher.stepper.fill([matcher.state], [0], bits)
        if not bits[0, token >> 5] >> (token & 31) & 1:
            return False
        assert matcher.stepper.accept([matcher.state], [token]) == [None]
    return matcher.stepper.ended(matcher.state, END)


def draw(grammar: Grammar, seed: int, most: int = 400) -> list[int] | None:
    """A random text of the grammar, without its end token; None if it is longer than `most` tokens. End
    tokens and closing characters are preferred, because random strings rarely end."""
    rng = random.Random(seed)
    matcher: Matcher = grammar.matcher()
    bits = np.zeros((1, matcher.stepper.words), np.int32)
    out: list[int] = []
    while len(out) < most:
        matcher.stepper.fill([matcher.state], [0], bits)
        permitted = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert permitted
        closing = [token for token in permitted if token in _CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.5 else permitted)
        assert matcher.stepper.accept([matcher.state], [token]) == [None]
        if token in (END, TURN):
            return out
        out.append(token)
    return None


_CLOSING = frozenset((END, TURN, ord('"'), ord("}"), ord("]"), ord(","), 256, 257, 258))
