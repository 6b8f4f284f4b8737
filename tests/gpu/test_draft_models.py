"""Draft models from tiny checkpoints with public names, against plain torch over a whole sequence at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.errors import ModelError
from core.models import DraftSpec, read_draft
from gpu.build import spec_of
from gpu.context import AuxStates
from gpu.models.base import CausalModel
from gpu.models.draft import BlockModel, ChainModel, DraftModel
from gpu.thread import device_thread
from gpu.weights import load_draft, load_model
from tests.rigs import draft_heads, tiny_model
from tests.rigs.draft_heads import HIDDEN, VOCAB, Pages
from tests.rigs.naive_heads import Naive

CPU = torch.device("cpu")
BLOCKS = [name for name in draft_heads.CONFIGS if "dflash" in name]
CHAINS = [name for name in draft_heads.CONFIGS if name not in BLOCKS]


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with device_thread(CPU):
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    path = tiny_model.build("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6).path
    model = load_model(spec_of(path), path, torch.float32, CPU)
    with device_thread(CPU):
        model.seal()
    return model


def spec_for(name: str, target: CausalModel) -> DraftSpec:
    return read_draft(draft_heads.CONFIGS[name], target.spec)


def load(name: str, target: CausalModel, path: Path, **changes: torch.Tensor | None) -> DraftModel:
    source = draft_heads.write(name, path, **changes)
    return load_draft(spec_for(name, target), source, target, torch.float32, CPU)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to float32 rounding. It is relative to the largest value: sums of fewer or more rows run in
    another order, and heads without a final norm have logits of 200 where others have 8."""
    atol = 1e-5 * max(float(want.abs().max()), 1.0) if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_model_in_chunks_is_the_whole_sequence_at_once(
    name: str, target: CausalModel, tmp_path: Path
) -> None:
    model, naive = load(name, target, tmp_path), Naive(name)
    assert isinstance(model, ChainModel)
    spec, n = model.spec, 11
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (n,), generator=draw)
    aux = torch.randn(n, draft_heads.aux_width(spec), generator=draw)
    embedding = naive.weights.get("embed_tokens.weight", target.embedding)[ids]
    if spec.algorithm == "eagle":
        fused = aux
        out = following = naive.eagle(embedding, aux, spec.decoder.layers)
        logits = target.logits(out)
    else:
        fused = naive.fuse(aux)
        following = naive.eagle3(embedding, fused, spec)
        out = naive.norm("norm", following)
        following = out if spec.norm_output else following
        logits = naive.linear("lm_head", out)
    torch.testing.assert_close(model.fuse(aux), fused)
    pages = Pages.of(spec.decoder)
    for start, end in [(0, 5), (5, 6), (6, n)]:
        part = slice(start, end)
        ctx = pages.chunk(0, start, end - start)
        got, then = model.forward(ctx, ids[part], model.fuse(aux[part]))
        assert_near(model.logits(got), logits[part])
        assert_near(then, following[part])
        wanted = torch.tensor([end - start - 1, 0])
        few = model.forward(ctx._replace(wanted=wanted), ids[part], model.fuse(aux[part]))
        for mine, every in zip(few, (got, then), strict=True):
            assert_near(mine, every[wanted])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_model_drafts_behind_the_targets_states(
    name: str, target: CausalModel, tmp_path: Path
) -> None:
    model, naive = load(name, target, tmp_path), Naive(name)
    assert isinstance(model, BlockModel)
    spec, n = model.spec, 9
    draw = torch.Generator().manual_seed(2)
    aux = torch.randn(n, draft_heads.aux_width(spec), generator=draw)
    fused = naive.norm("hidden_norm", naive.linear("fc", aux))
    torch.testing.assert_close(model.fuse(aux), fused)
    pages = Pages.of(spec.decoder)
    for start, end in [(0, 2), (2, 7), (7, n)]:
        model.store(pages.chunk(0, start, end - start), model.fuse(aux[start:end]))
        ids = torch.tensor([17 + end, *[spec.mask_token] * (spec.block_size - 1)])
        got = model.forward(pages.block(0, end, len(ids), spec.causal), ids)
        block = naive.weights.get("embed_tokens.weight", target.embedding)[ids]
        want = naive.dflash(fused[:end], block, spec.causal)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        head = naive.weights.get("lm_head.weight")
        logits = target.logits(want) if head is None else want @ head.T
        torch.testing.assert_close(model.logits(got), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", draft_heads.CONFIGS)
def test_token_ids_are_the_targets(name: str, target: CausalModel, tmp_path: Path) -> None:
    ids, tensors = load(name, target, tmp_path).token_ids, draft_heads.tensors(name)
    assert (ids is None) == ("d2t" not in tensors)
    if ids is not None:
        assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


@pytest.mark.parametrize("name", draft_heads.CONFIGS)
def test_every_tensor_counts(name: str, target: CausalModel, tmp_path: Path) -> None:
    """One missing, one extra, one of another shape: each is refused and named."""
    tensors = draft_heads.tensors(name)
    optional = {"t2d", "fc.bias", "embed_tokens.weight", "model.embed_tokens.weight"}
    if "d2t" not in tensors:
        optional.add("lm_head.weight")  # the target has one for the same tokens
    for key, tensor in tensors.items():
        stem = ".".join(key.removeprefix("fusion_").split(".")[-2:])
        if key not in optional:
            with pytest.raises(ModelError, match=stem):
                load(name, target, tmp_path, **{key: None})
        if key != "t2d":
            other = torch.zeros(len(tensor) + 1, *tensor.shape[1:], dtype=tensor.dtype)
            with pytest.raises(ModelError, match=f"{re.escape(stem)} .* instead of"):
                load(name, target, tmp_path, **{key: other})
    with pytest.raises(ModelError, match=r"not part of this architecture: layers\.7\.mlp\.up_proj\.weight"):
        load(name, target, tmp_path, **{"layers.7.mlp.up_proj.weight": torch.zeros(1)})


def test_a_copy_of_the_targets_embedding_is_not_kept(target: CausalModel, tmp_path: Path) -> None:
    changes = {"embed_tokens.weight": target.embedding.clone()}
    assert load("eagle", target, tmp_path, **changes).embedding is target.embedding
    assert load("eagle", target, tmp_path).embedding is not target.embedding


def test_a_head_goes_on_with_other_weights_of_its_target(target: CausalModel, tmp_path: Path) -> None:
    """After an update the head shares the new target's weights, as if it had been loaded for that target."""
    path = draft_heads.write("eagle3.1", tmp_path, **{"lm_head.weight": None})
    spec = read_draft(draft_heads.CONFIGS["eagle3.1"], target.spec)
    other = load_model(target.spec, None, torch.float32, CPU)
    other.seal()
    moved, loaded = (load_draft(spec, path, each, torch.float32, CPU) for each in (target, other))
    moved.retarget(other)
    assert moved.embedding is other.embedding
    states = torch.randn(3, target.spec.hidden)
    torch.testing.assert_close(moved.logits(states), loaded.logits(states))


@pytest.mark.parametrize("name", draft_heads.CONFIGS)
def test_random_weights_need_no_checkpoint(name: str, target: CausalModel) -> None:
    model = load_draft(spec_for(name, target), None, target, torch.float32, CPU)
    logits = model.logits(torch.ones(2, HIDDEN))
    assert logits.shape == (2, model.spec.draft_vocab) and bool(logits.isfinite().all())


def test_a_draft_vocabulary_beyond_the_targets_is_refused(target: CausalModel, tmp_path: Path) -> None:
    shifted = draft_heads.tensors("eagle3")["d2t"] + VOCAB
    with pytest.raises(ModelError, match=f"names token .* of {VOCAB}"):
        load("eagle3", target, tmp_path, d2t=shifted)


def test_a_pickled_checkpoint_is_refused_with_what_to_do(target: CausalModel, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only safetensors .* convert its pytorch_model\.bin"):
        load_draft(spec_for("eagle", target), tmp_path, target, torch.float32, CPU)


@pytest.mark.parametrize("variant", ["llama", "olmo3", "qwen3-moe", "qwen3-window", "gpt-oss"])
@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 1, 1), ()])
def test_a_target_keeps_the_states_a_draft_reads(
    variant: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """In chunks, and whether or not all rows of its output are wanted, as transformers has them."""
    made = tiny_model.build(variant, tmp_path)
    model = load_model(spec_of(made.path), made.path, torch.float32, CPU)
    ids = torch.tensor([(i * 37 + 5) % VOCAB for i in range(23)])
    with torch.no_grad():
        states = made.reference(ids[None], output_hidden_states=True).hidden_states
    want = torch.cat([states[i][0] for i in layers or (-1,)], 1)
    last = states[-1][0]
    for rows in (None, torch.tensor([1, 3]), torch.tensor([], dtype=torch.int64)):
        pages = Pages.of(model.spec)
        for start, end in [(0, 4), (4, 11), (11, 23)]:
            out = torch.full((16, want.shape[1]), float("nan"))
            ctx = pages.chunk(0, start, end - start)._replace(wanted=rows, aux=AuxStates(layers, out))
            got = model.forward(ctx, ids[start:end])
            assert_near(out[: end - start], want[start:end])
            assert bool(out[end - start :].isnan().all())
            part = last[start:end] if rows is None else last[start:end][rows]
            assert_near(got, part)
    model.forward(pages.chunk(1, 0, 2)._replace(brief=True, aux=AuxStates(layers, out)), ids[:2])
