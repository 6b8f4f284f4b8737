"""bench.heads: training, evaluation and the checkpoints agree with a chain that is drafted token by token."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.heads.__main__ import head_sizes
from bench.heads.data import Answered, Prompt, batches, pad, questions, split
from bench.heads.evaluate import Count, evaluate, right_drafts, walk
from bench.heads.layers import Head, Size
from bench.heads.target import LOOK, Target
from bench.heads.train import load_weights, make_head, save_head
from tests.rigs.tiny_model import VOCAB, Tiny, build

HIDDEN, DIM, LAYERS = 64, 16, 7
SIZES = {
    "eagle3": Size(1, 4, 2, 48, (2, 3, 5)),
    "eagle3-vocab": Size(1, 2, 1, 48, (2, 3, 5), draft_vocab=100),
    "dflash": Size(2, 4, 2, 48, (1, 6), block=4),
}
MASK = 3
DRAFTS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return Target(tiny.path, torch.float32, torch.device("cpu"))


@pytest.fixture(params=SIZES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def head(name: str, target: Target) -> Head:
    torch.manual_seed(1)
    made = make_head(target, SIZES[name], torch.randperm(VOCAB), MASK)
    made.fc.calibrate(torch.rand(50, len(made.size.aux) * HIDDEN) + 0.5)
    for parameter in made.parameters():  # no zeros, no ones: they would hide a term that is missing
        parameter.data += torch.randn_like(parameter) * 0.1
    return made


ROWS = [
    Answered("a", 4, torch.randint(4, VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist()),
    Answered("b", 5, torch.randint(4, VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist()),
]

# -- the target ------------------------------------------------------------------------------------


def test_hidden_states_are_those_of_transformers(tiny: Tiny, target: Target) -> None:
    ids = torch.tensor([ROWS[0].ids])
    seen = target.see(ids, range(1, LAYERS))
    with torch.no_grad():
        wanted = tiny.reference(ids, output_hidden_states=True)
    for layer in range(1, LAYERS):
        torch.testing.assert_close(seen.inputs[layer], wanted.hidden_states[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(seen.final), wanted.logits, atol=1e-4, rtol=1e-4)


def test_answers_are_greedy_and_end(target: Target) -> None:
    prompts = [torch.randint(4, VOCAB, (n,)).tolist() for n in (3, 9, 5, 20)]
    limit, later = 2 * LOOK + 2, time.monotonic() + 600
    endless = target.answer(prompts, [0.0] * 4, limit, {VOCAB}, later)
    for prompt, answer in zip(prompts, endless, strict=True):
        best = target.logits(target.see(torch.tensor([prompt + answer])).final[0]).argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == answer
        assert len(answer) == limit
    ends = {endless[0][3], endless[1][LOOK + 1]}
    cut = [next((i for i, token in enumerate(row) if token in ends), limit) + 1 for row in endless]
    assert min(cut) < LOOK < max(cut)  # so that rows are dropped while others go on
    wanted = [row[:count] for row, count in zip(endless, cut, strict=True)]
    assert target.answer(prompts, [0.0] * 4, limit, ends, later) == wanted


def test_answers_are_sampled_at_their_temperatures(target: Target) -> None:
    prompts = [[5, 6]] * 2000
    torch.manual_seed(0)
    first = [row[0] for row in target.answer(prompts, [2.0] * len(prompts), 2, {0}, time.monotonic() + 600)]
    wanted = (target.logits(target.see(torch.tensor([[5, 6]])).final[0, -1]) / 2.0).softmax(-1)
    share = torch.bincount(torch.tensor(first), minlength=VOCAB) / len(first)
    assert (share - wanted).abs().max() < 0.04


# -- checkpoints -----------------------------------------------------------------------------------

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_shapes(size: Size, inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors that both formats have."""
    q, kv = size.heads * DIM, size.kv_heads * DIM
    attention = dict(zip(ATTENTION, [(q, inputs), (kv, inputs), (kv, inputs), (HIDDEN, q)], strict=True))
    return {
        **{f"self_attn.{name}.weight": shape for name, shape in attention.items()},
        "mlp.gate_proj.weight": (size.intermediate, HIDDEN),
        "mlp.up_proj.weight": (size.intermediate, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, size.intermediate),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }


def test_checkpoint_has_the_published_names(head: Head, name: str, tmp_path: Path) -> None:
    size = SIZES[name]
    wanted = {"fc.weight": (HIDDEN, len(size.aux) * HIDDEN), "norm.weight": (HIDDEN,)}
    if size.block:
        wanted["hidden_norm.weight"] = (HIDDEN,)
        for layer in range(size.layers):
            shapes = layer_shapes(size, HIDDEN) | dict.fromkeys(
                ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (DIM,)
            )
            wanted |= {f"layers.{layer}.{tensor}": shape for tensor, shape in shapes.items()}
    else:
        shapes = layer_shapes(size, 2 * HIDDEN) | {"hidden_norm.weight": (HIDDEN,)}
        wanted |= {f"midlayer.{tensor}": shape for tensor, shape in shapes.items()}
    if size.draft_vocab:
        wanted |= {"lm_head.weight": (size.draft_vocab, HIDDEN), "d2t": (size.draft_vocab,)}

    assert save_head(head, tmp_path) == (tmp_path / "model.safetensors").stat().st_size
    found = load_file(tmp_path / "model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in found.items()} == wanted
    assert {key for key, tensor in found.items() if tensor.dtype != torch.bfloat16} <= {"d2t"}
    if size.draft_vocab:
        ids = found["d2t"] + torch.arange(size.draft_vocab)
        assert found["d2t"].dtype == torch.int64
        assert ids.unique().equal(ids)
        assert set(ids.tolist()) <= set(range(VOCAB))


def test_config_has_the_published_keys(head: Head, name: str, tmp_path: Path) -> None:
    size = SIZES[name]
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_attention_heads"] == size.heads
    assert config["num_hidden_layers"] == size.layers
    assert (config["hidden_size"], config["head_dim"], config["vocab_size"]) == (HIDDEN, DIM, VOCAB)
    assert config["rope_theta"] == 10000.0
    if size.block:
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["block_size"] == size.block
        assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 5], "causal": False}
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
        assert config["draft_vocab_size"] == (size.draft_vocab or VOCAB)
        assert config["target_hidden_size"] == HIDDEN


def test_committed_sizes_fit() -> None:
    """One head is committed: of those for SmolLM2-135M two have less than 8 MB in 16 bits."""
    hidden, dim = 576, 64
    sizes = head_sizes(30, 9, 3)
    for name in ("eagle3", "eagle3-vocab"):
        size = sizes[name]
        attention = (2 * hidden) * (size.heads + 2 * size.kv_heads) * dim + size.heads * dim * hidden
        weights = (3 * hidden + 3 * size.intermediate + size.draft_vocab) * hidden + attention + 5 * hidden
        assert 2 * weights + 8 * size.draft_vocab + 2000 < 8_000_000
    assert sizes["eagle3"].aux == (2, 15, 27)


# -- drafting token by token, from the files alone ---------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rope(x: Tensor, position: int) -> Tensor:
    """Rotated heads [heads, DIM]."""
    angles = position / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Naive:
    """One layer's arithmetic over single positions."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self._tensors = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self._tensors[f"{name}.weight"])

    def project(self, name: str, x: Tensor) -> Tensor:
        return self._tensors[f"{name}.weight"] @ x

    def heads(self, name: str, x: Tensor, position: int) -> Tensor:
        found = self.project(f"self_attn.{name}_proj", x).view(-1, DIM)
        if f"self_attn.{name}_norm.weight" in self._tensors:
            found = self.norm(f"self_attn.{name}_norm", found)
        return found if name == "v" else rope(found, position)

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        found = []
        for head in range(len(q)):
            kv = head // (len(q) // len(keys[0]))
            scores = torch.stack([q[head] @ k[kv] for k in keys]) / DIM**0.5
            found.append(scores.softmax(0) @ torch.stack([v[kv] for v in values]))
        return self.project("self_attn.o_proj", torch.cat(found))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.project("mlp.gate_proj", x), self.project("mlp.up_proj", x)
        return self.project("mlp.down_proj", torch.nn.functional.silu(gate) * up)


def draft(target: Target, directory: Path, ids: list[int], fed: list[int]) -> list[int]:
    """Draft behind the text `ids`, one token more than `fed`, which are the tokens to go on with in place of
    the drafts' own."""
    tensors = {key: x.float() for key, x in load_file(directory / "model.safetensors").items()}
    config = json.loads((directory / "config.json").read_text())
    block = config.get("block_size", 0)
    if block:
        layers = [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
    else:
        layers = config["eagle_aux_hidden_state_layer_ids"]
    # The target has not seen the last token yet.
    seen = target.see(torch.tensor([ids[:-1]]), layers)
    fused = [
        tensors["fc.weight"] @ torch.cat([seen.inputs[i][0, p] for i in layers]) for p in range(len(ids) - 1)
    ]
    if block:
        return naive_block(target, tensors, config, ids, fused)[: len(fed) + 1]
    return naive_chain(target, tensors, ids, fed, fused)


def naive_chain(
    target: Target, tensors: dict[str, Tensor], ids: list[int], fed: list[int], fused: list[Tensor]
) -> list[int]:
    layer = Naive(tensors, "midlayer.")
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def entry(position: int, hidden: Tensor, token: int) -> Tensor:
        embedded = layer.norm("input_layernorm", target.embedding[token])
        x = torch.cat([embedded, layer.norm("hidden_norm", hidden)])
        keys.append(layer.heads("k", x, position))
        values.append(layer.heads("v", x, position))
        hidden = hidden + layer.attend(layer.heads("q", x, position), keys, values)
        return hidden + layer.mlp(layer.norm("post_attention_layernorm", hidden))

    hidden = [entry(position, fused[position], ids[position + 1]) for position in range(len(fused))][-1]
    drafts = []
    for step in range(len(fed) + 1):
        best = int(
            (tensors.get("lm_head.weight", target.head) @ rms(hidden, tensors["norm.weight"])).argmax()
        )
        drafts.append(best + int(tensors["d2t"][best]) if "d2t" in tensors else best)
        if step < len(fed):
            hidden = entry(len(fused) + step, hidden, fed[step])
    return drafts


def naive_block(
    target: Target, tensors: dict[str, Tensor], config: dict, ids: list[int], fused: list[Tensor]
) -> list[int]:
    context = [rms(hidden, tensors["hidden_norm.weight"]) for hidden in fused]
    tokens = [ids[-1]] + [config["dflash_config"]["mask_token_id"]] * (config["block_size"] - 1)
    places = range(len(fused), len(fused) + len(tokens))
    states = [target.embedding[token] for token in tokens]
    for number in range(config["num_hidden_layers"]):
        layer = Naive(tensors, f"layers.{number}.")
        normed = [layer.norm("input_layernorm", x) for x in states]
        sources = list(enumerate(context)) + list(zip(places, normed, strict=True))
        keys = [layer.heads("k", x, position) for position, x in sources]
        values = [layer.heads("v", x, position) for position, x in sources]
        for i, position in enumerate(places):
            found = layer.attend(layer.heads("q", normed[i], position), keys, values)
            hidden = states[i] + found
            states[i] = hidden + layer.mlp(layer.norm("post_attention_layernorm", hidden))
    return [int((target.head @ rms(x, tensors["norm.weight"])).argmax()) for x in states[1:]]


@torch.no_grad()
def test_parallel_drafts_equal_those_of_a_chain(head: Head, target: Target, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    load_weights(head, tmp_path)
    batch = pad(ROWS, torch.device("cpu"))
    found = head.drafts(batch, target.see(batch.ids, head.size.aux), DRAFTS)
    for i, row in enumerate(ROWS):
        for at in range(1, len(row.ids)):
            fed = row.ids[at + 1 : at + DRAFTS]  # at the answer's end the chain is shorter
            assert found[i, at, : len(fed) + 1].tolist() == draft(target, tmp_path, row.ids[: at + 1], fed)


def test_every_tensor_is_trained(head: Head, target: Target) -> None:
    batch = pad(ROWS, torch.device("cpu"))
    losses = []
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(12):
        torch.manual_seed(0)
        loss = head.loss(batch, target.see(batch.ids, head.size.aux))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        assert all(each.grad is not None and each.grad.any() for each in head.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


# -- accepted lengths ------------------------------------------------------------------------------


def simulate(ids: list[int], start: int, drafts: list[list[int]], most: int) -> Count:
    """Verification as a server does it, against the answer's own tokens."""
    text, steps = ids[: start + 1], 0
    while len(text) < len(ids):
        steps += 1
        for proposed in drafts[len(text) - 1][:most]:
            if len(text) == len(ids) or proposed != ids[len(text)]:
                break
            text.append(proposed)
        if len(text) < len(ids):
            text.append(ids[len(text)])
    return Count(len(ids) - 1 - start, steps)


def test_accepted_lengths_are_those_of_a_simulation() -> None:
    order = random.Random(0)
    for _ in range(200):
        ids = [order.randrange(3) for _ in range(order.randint(6, 30))]
        drafts = [[order.randrange(3) for _ in range(5)] for _ in ids]
        start, most = order.randrange(len(ids) - 1), order.randint(1, 5)
        right = right_drafts(torch.tensor([ids]), torch.tensor([drafts]))[0].tolist()
        assert walk(right, start, len(ids), most) == simulate(ids, start, drafts, most)


def test_evaluation_counts_by_category(head: Head, target: Target) -> None:
    with torch.no_grad():
        batch = pad(ROWS, torch.device("cpu"))
        drafts = head.drafts(batch, target.see(batch.ids, head.size.aux), DRAFTS).tolist()
    found = evaluate(head, target, ROWS, (1, DRAFTS), tokens=64)
    assert set(found) == {"a", "b", "all"}
    for count in (1, DRAFTS):
        counts = [simulate(row.ids, row.start, drafts[i], count) for i, row in enumerate(ROWS)]
        assert [found["a"][count], found["b"][count]] == counts
        assert found["all"][count] == Count(*map(sum, zip(*counts, strict=True)))


# -- prompts ---------------------------------------------------------------------------------------


def test_questions_of_each_set(tmp_path: Path) -> None:
    lines = [
        {"question": "2 + 2?", "answer": "4"},
        {"category": "math_reasoning", "turns": ["2 + 2?"]},
        {"category": "writing", "turns": ["Write.", "Again."]},
        {"prompt": "def f():", "entry_point": "f"},
        {"text": "Add.", "test_list": ["assert add(1, 2) == 3"]},
        {"other": 1},
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = questions(tmp_path)
    assert [category for category, _ in found] == ["math_reasoning", "mt-bench", "humaneval", "mbpp"]
    assert found[1][1] == "Write."
    assert "assert add(1, 2) == 3" in found[3][1]


def test_split_holds_out_a_share_of_each_category() -> None:
    prompts = [(category, str(i), [i]) for category, count in (("a", 40), ("b", 3)) for i in range(count)]
    made = [Prompt(*each) for each in prompts]
    train, held = split(made, 0.1, seed=0)
    assert [sum(each.category == name for each in held) for name in "ab"] == [4, 1]
    assert sorted(train + held) == sorted(made)
    assert split(made, 0.1, seed=0) == (train, held)


def test_batches_have_every_row_once() -> None:
    order = random.Random(0)
    rows = [Answered("a", 1, [i] * order.randint(2, 300)) for i in range(100)]
    groups = batches(rows, 1000, order)
    assert sorted(row.ids[0] for group in groups for row in group) == list(range(100))
    assert all(len(group) == 1 or len(group) * max(len(row.ids) for row in group) <= 1000 for group in groups)
