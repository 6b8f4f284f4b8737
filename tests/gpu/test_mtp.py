"""Layers for multi-token prediction (MTP) draft for the checkpoints that they lie in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from core.config import CacheConfig, SpeculativeConfig
from core.errors import ConfigError, ModelError
from core.models import DraftSpec, ModelSpec
from core.models.mtp import mtp_draft
from core.request import SamplingParams
from gpu.build import spec_of
from gpu.draft.build import Draft, read_drafting
from gpu.draft.tree import Tree
from gpu.models.base import CausalModel
from gpu.models.draft import ChainModel
from gpu.models.mtp import Mtp
from gpu.thread import device_thread
from gpu.weights import load_draft, load_model
from tests.rigs import drafters, gguf_file, mtp, tiny_model
from tests.rigs.draft_heads import Pages
from tests.rigs.draft_jobs import FEW, HOSTS_OWN, Engines, engines_of, jobs, same
from tests.rigs.drafting import Drafts
from tests.rigs.driver import Driver, serve
from tests.rigs.fp8_files import per_block, quantised
from tests.rigs.int4_files import KINDS, WIDE, plain_of, quantise
from tests.rigs.runner import CPU
from tests.rigs.tiny_model import VOCAB

VARIANTS: dict[str, dict[str, Any]] = {
    "glm4-moe": {},
    "deepseek-v3": {},
    "glm4-moe-lite": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "qwen3-next": {},
    "qwen3.5": {},
    "qwen3.5-moe": {},
}


def loaded(path: Path, spec: ModelSpec | None = None) -> tuple[CausalModel, ChainModel]:
    """A checkpoint's model, and what drafts for it."""
    with device_thread(CPU):
        target = load_model(spec or spec_of(path), path, torch.float32, CPU)
        target.seal()
        layer = load_draft(mtp_draft(target.spec), path, target, torch.float32, CPU)
    assert isinstance(layer, ChainModel)
    return target, layer


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_in_chunks_is_the_whole_text_at_once(variant: str, tmp_path: Path) -> None:
    """Over pages, of whole chunks and of the rows that are wanted of them; then from its own states."""
    made = mtp.build(variant, tmp_path, **VARIANTS[variant])
    target, layer = loaded(made.path)
    ids, n = torch.randint(VOCAB, (13,), generator=torch.Generator().manual_seed(1)), 11
    with device_thread(CPU), torch.no_grad():
        states = made.states(ids)
        got = target.forward(Pages.of(target.spec).chunk(0, 0, len(ids)), ids)
        torch.testing.assert_close(got, states, rtol=1e-4, atol=1e-4)
        logits, following = made.predict(ids[1 : n + 1], states[:n])
        pages = Pages.of(layer.spec.decoder)
        for start, end in [(0, 5), (5, 6), (6, n)]:
            part = slice(start, end)
            ctx = pages.chunk(0, start, end - start)
            got, then = layer.forward(ctx, ids[1:][part], states[part].clone())
            torch.testing.assert_close(layer.logits(got), logits[part], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(then, following[part], rtol=1e-4, atol=1e-4)
            wanted = torch.tensor([end - start - 1, 0])
            few, _ = layer.forward(ctx._replace(wanted=wanted), ids[1:][part], states[part].clone())
            torch.testing.assert_close(few, got[wanted], rtol=1e-4, atol=1e-4)
        # The second draft reads the token after those and the state that the layer itself has made.
        more = torch.cat([states[:n], following[-1:]])
        logits, _ = made.predict(ids[1 : n + 2], more)
        got, _ = layer.forward(pages.chunk(0, n, 1), ids[n + 1 : n + 2], following[-1:].clone())
        torch.testing.assert_close(layer.logits(got), logits[-1:], rtol=1e-4, atol=1e-4)


# -- through the scheduler, with everything that a request may ask for ---------------------------------


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines_of(mtp.build("deepseek-v3", tmp_path_factory.mktemp("v3")).path) as made:
        yield made


async def test_guesses_change_no_text_of_retracted_rows(v3: Engines) -> None:
    plain = await v3.plain(jobs(FEW))
    engine = v3.make(Drafts(3, 0.0, drafters.mtp(v3.path)), 1)
    for answer in await engine.answers(jobs(FEW), retract=True):
        same(answer, plain[answer.run.id])
    assert engine.scheduler.counters.retractions > 5


async def test_guesses_of_a_tree_change_no_text(v3: Engines) -> None:
    plain, tree = await v3.plain(jobs(FEW)), Tree(3, 2, 5)
    engine = v3.make(Drafts(tree.nodes, 0.0, drafters.mtp(v3.path, tree), trees=True), 2)
    for answer in await engine.answers(jobs(FEW)):
        same(answer, plain[answer.run.id])


async def test_a_layer_that_knows_the_model_is_always_right(tmp_path: Path) -> None:
    """Drawn tokens too: drafts have the noise of their positions."""
    depth = 7
    with engines_of(mtp.build("glm4-moe", tmp_path, right=True).path) as engines:
        plain = await engines.plain(jobs(FEW))
        engine = engines.make(Drafts(depth, 0.0, drafters.mtp(tmp_path)), 1)
        for answer in await engine.answers(jobs(FEW)):
            same(answer, plain[answer.run.id])
            assert answer.run.id not in HOSTS_OWN or engine.runner.most[answer.run.prompt.tobytes()] == 1
    for name in ("greedy", "seeded"):
        assert engine.runner.most[plain[name].run.prompt.tobytes()] == 1 + depth


# -- from settings --------------------------------------------------------------------------------------

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (40, 23, 61, 40)]
TOKENS = 24


def served(path: Path, algorithm: str, tp: int = 1) -> tuple[list[list[int]], Driver]:
    """Texts of the prompts, twice, by a server's executor with too few pages for all rows at once, and what
    ran them."""
    driver = serve(path, f"--kv-tokens 128 --tp {tp} --speculative-algorithm {algorithm}")
    try:
        params = [SamplingParams(temperature=0.0, max_tokens=TOKENS)] * len(PROMPTS)
        found = [answer.tokens for _ in range(2) for answer in driver.run(PROMPTS, params)]
    finally:
        driver.close()
    return found, driver


@pytest.mark.parametrize(
    ("variant", "tp"), [("glm4-moe", 1), ("deepseek-v3", 2), ("qwen3.5", 1), ("qwen3-next", 2)]
)
def test_accepted_drafts_are_counted_and_save_steps(variant: str, tp: int, tmp_path: Path) -> None:
    """Requests have chunks, preemption and prefix hits; each rank has the whole layer."""
    path = mtp.build(variant, tmp_path, right=True).path
    (want, plain), (got, drafted) = served(path, "none"), served(path, "NEXTN", tp)
    assert got == want
    assert plain.scheduler.counters.retractions and drafted.scheduler.counters.retractions
    assert drafted.scheduler.counters.steps < 0.7 * plain.scheduler.counters.steps
    assert drafted.drafts.accepted == drafted.drafts.drafted > 3 * TOKENS


def read(path: Path, dummy: bool = False) -> Draft | None:
    return read_drafting(SpeculativeConfig(algorithm="mtp"), path, spec_of(path), dummy, spec_of)


def test_a_checkpoint_without_such_a_layer_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    dense = tiny_model.build("llama", tmp_path / "llama").path
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layer for multi-token prediction"):
        read(dense)
    glm = tiny_model.build("glm4-moe", tmp_path / "glm").path
    with pytest.raises(ModelError, match=r"glm has no tensors model\.layers\.2\.\*, the layer for"):
        read(glm)
    assert read(glm, dummy=True) is not None, "random weights need none"
    told = json.loads((glm / "config.json").read_text())
    (glm / "config.json").write_text(json.dumps({**told, "num_nextn_predict_layers": 3}))
    with pytest.raises(ConfigError, match=r"has 3 layers .* \(num_nextn_predict_layers"):
        read(glm)
    file = gguf_file.write(
        tmp_path / "t.gguf", "glm4moe", tiny_model.build("glm4-moe", tmp_path / "a").reference
    )
    with pytest.raises(ModelError, match=r"t\.gguf: layers for multi-token prediction come from safetens"):
        read(file)
    hybrid = tiny_model.build("qwen3-next", tmp_path / "hybrid").path
    with pytest.raises(ModelError, match=r"hybrid has no tensors mtp\.\*, the layer for multi-token"):
        read(hybrid)
    told = json.loads((hybrid / "config.json").read_text())
    (hybrid / "config.json").write_text(json.dumps({**told, "mtp_num_hidden_layers": 0}))
    with pytest.raises(ConfigError, match=r"has no layer .* \(mtp_num_hidden_layers of its config.json\)"):
        read(hybrid)


def test_memory_is_reckoned_for_what_the_layer_has(tmp_path: Path) -> None:
    path = mtp.build("deepseek-v3", tmp_path).path
    draft, target = read(path), load_model(spec_of(path), None, torch.float32, CPU)
    assert draft is not None and isinstance(draft.spec, DraftSpec)
    places = Mtp(draft.spec, target, torch.float32, CPU).places()
    matrices = sum(place.numel() for place in places.values() if place.dim() > 1)
    assert draft.held_bytes(target.spec, (0, 0, 0), 0, torch.float32) == 4 * matrices
    cache = CacheConfig(page_size=16)
    assert draft.page_bytes(cache, torch.float32) == 16 * (32 + 8) * 4, "latents, and a key of all heads"


def test_every_tensor_counts(tmp_path: Path) -> None:
    file = mtp.build("glm4-moe", tmp_path).path / "model.safetensors"
    tensors = load_file(file)
    copies = {f"{mtp.PREFIX}embed_tokens.weight", f"{mtp.PREFIX}shared_head.head.weight"}
    for name in (f"{mtp.PREFIX}hnorm.weight", f"{mtp.PREFIX}mlp.experts.3.up_proj.weight"):
        left = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(left, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"1 tensors missing: {re.escape(name)}"):
            loaded(tmp_path)
    save_file({**tensors, f"{mtp.PREFIX}other": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"not part of this architecture: {re.escape(mtp.PREFIX)}other"):
        loaded(tmp_path)
    save_file({key: each for key, each in tensors.items() if key not in copies}, file, {"format": "pt"})
    loaded(tmp_path)


def test_a_hybrids_layer_may_stack_its_experts(tmp_path: Path) -> None:
    """Experts are stacked as Qwen3.5's are. With an embedding of its own the layer is refused: here it reads
    the target's."""
    path = mtp.build("qwen3.5-moe", tmp_path).path
    _, want = loaded(path)
    with device_thread(CPU):
        ctx, states = Pages.of(want.spec.decoder).chunk(0, 0, 5), torch.randn(5, 64)
        expected, _ = want.forward(ctx, torch.arange(5), states.clone())
    file, own = path / "model.safetensors", "mtp.layers.0.mlp.experts."
    stored = load_file(file)
    named = {name: stored.pop(name) for name in [name for name in stored if name.startswith(own)]}
    each = [
        {part: named[f"{own}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        for expert in range(4)
    ]
    stored[f"{own}gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in each])
    stored[f"{own}down_proj"] = torch.stack([one["down"] for one in each])
    save_file(stored, file, metadata={"format": "pt"})
    _, layer = loaded(path)
    with device_thread(CPU):
        ctx = Pages.of(layer.spec.decoder).chunk(0, 0, 5)
        torch.testing.assert_close(layer.forward(ctx, torch.arange(5), states.clone())[0], expected)
    save_file({**stored, "mtp.embed_tokens.weight": torch.ones(VOCAB, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"not part of this architecture: mtp\.embed_tokens\.weight"):
        loaded(path)


@pytest.mark.parametrize("variant", ["glm4-moe", "deepseek-v3", "qwen3-next"])
def test_an_fp8_layer_is_the_numbers_that_it_stands_for(variant: str, tmp_path: Path) -> None:
    """Packed where the model holds them packed, else dequantised."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
    coarse, plain = (mtp.build(variant, tmp_path / name, **wide).path for name in ("coarse", "plain"))
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    meant = quantised(coarse, per_block, "_scale_inv", blocks)
    save_file(load_file(plain / "model.safetensors") | meant, plain / "model.safetensors")
    spec, states = spec_of(coarse), torch.randn(5, 128, generator=torch.Generator().manual_seed(4))
    assert spec.stored_fp8 == "blocks"
    logits = []
    for path, own in ((plain, spec_of(plain)), (coarse, spec), (coarse, replace(spec, fp8="blocks"))):
        _, layer = loaded(path, own)
        with device_thread(CPU):
            ctx = Pages.of(layer.spec.decoder).chunk(0, 0, len(states))
            made, _ = layer.forward(ctx, torch.arange(len(states)), states.clone())
            logits.append(layer.logits(made))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    off = (logits[2] - logits[0]).abs().max() / logits[0].abs().max()
    assert 1e-3 < off < 0.1, "products of 8 bits round what they multiply"


@pytest.mark.parametrize("excepted", [False, True])
@pytest.mark.parametrize("variant", ["glm4-moe", "deepseek-v3", "qwen3-next", "qwen3.5-moe"])
def test_a_layer_of_a_checkpoint_in_4_bits(variant: str, excepted: bool, tmp_path: Path) -> None:
    """The layer may be the one that stays as it is: then it counts in full."""
    hybrid = variant.startswith("qwen")
    wide = {**WIDE, "num_hidden_layers": 3, "moe_intermediate_size": 128, "q_lora_rank": 128}
    wide |= {"shared_expert_intermediate_size": 128} if hybrid else {}
    prefix, own = ("mtp.", r"-:.*mtp\..*") if hybrid else (mtp.PREFIX, r"-:model\.layers\.2\..*")
    path = mtp.build(variant, tmp_path / "coarse", **wide, v_head_dim=32).path
    left = {"dynamic": {own: {}}} if excepted else {}
    plain = plain_of(
        path, quantise(path, KINDS["gptq"], (prefix,) if excepted else (), **left), tmp_path / "a"
    )
    spec, states = spec_of(path), torch.randn(5, 128, generator=torch.Generator().manual_seed(4))
    fine = replace(spec, int4=spec.stored_int4)
    logits = []
    for where, whole in ((plain, spec_of(plain)), (path, spec), (path, fine)):
        _, layer = loaded(where, whole)
        with device_thread(CPU):
            made, _ = layer.forward(
                Pages.of(layer.spec.decoder).chunk(0, 0, len(states)),
                torch.arange(len(states)),
                states.clone(),
            )
            logits.append(layer.logits(made))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-4, atol=1e-4)
    drafts = [
        read_drafting(SpeculativeConfig(algorithm="mtp"), path, own, False, spec_of) for own in (spec, fine)
    ]
    counted, less = (
        each.held_bytes(spec, (0, 0, 0), 0, torch.float32) for each in drafts if each is not None
    )
    assert (less == counted) if excepted else (less < 0.3 * counted)
