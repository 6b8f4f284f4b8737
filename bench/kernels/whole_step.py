"""Compiles every kernel of a captured step for sm_90 without a GPU: `python -m bench.kernels.whole_step`.

Unlike in `bench.kernels.compile` the runner launches the kernels, on CPU tensors of a model with one layer,
so that argument types, alignments and constants are those of serving. This shows compile errors, and kernels
that are compiled again from step to step. With --draft the kernels are those of a server that drafts, where a
decode row has several tokens. --jobs compiles in parallel into Triton's cache, which a server on
the same host then uses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.kernels.compile import compiling, report
from core.adapters import TARGETS, AdapterLimits
from core.config import SpeculativeConfig
from core.models import Fp8, ModelSpec
from gpu.adapters.pool import AdapterLayout
from gpu.attention.backend import AttentionBackend, attention_config
from gpu.attention.selector import PhasedAttention
from gpu.attention.triton_paged import TritonDecode, TritonPrefill
from gpu.build import spec_of
from gpu.cuda import MAX_CHUNKS, MakeOps, with_rank
from gpu.device import HOPPER, CudaFacts
from gpu.draft.build import Draft, make_drafter, pool_of, read_drafting
from gpu.draft.drafter import Drafter
from gpu.draft.model import DraftMachine
from gpu.draft.stage import DraftStage
from gpu.kernels.gemm.skinny import split_k_counters
from gpu.kernels.lora.linear import Branch
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape, weight_name
from gpu.kernels.ngram import look_up
from gpu.kernels.sampling import drafts as draft_kernels
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kernels.step import begin_step
from gpu.kv.pool import KvPool
from gpu.layers import Linear
from gpu.layers.moe import experts_held
from gpu.models.ranks import RankModel
from gpu.ops.fused import Kernels, TritonOps
from gpu.ops.peers import PeerOps
from gpu.peers import Exchanged, PeerGroup, PeerRank, peer_ranks
from gpu.ranks import Rank
from gpu.runner import ModelRunner
from gpu.shard import ALONE
from gpu.state.entry import CASCADE_ROWS
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import HiddenShape
from gpu.step.graphs import Work
from gpu.step.machine import Machine
from gpu.step.shape import Shape
from gpu.step.shapes import most_samples
from gpu.step.steps import PaddedSizes
from gpu.thread import device_thread
from gpu.weights import load_model

CPU = torch.device("cpu")
PAGES = 64
TREE_STEPS = 3
"""Forwards of the draft model for a tree."""
DEVICE = CudaFacts("", "NVIDIA H200", HOPPER, 132)

FP8_KINDS: dict[str, Fp8] = {"none": "", "fp8": "rows", "fp8-blocks": "blocks"}
"""Kinds of FP8 by --quantization."""


class PartLauncher:
    """A launcher that runs every `of`-th piece of work, from `first` on."""

    def __init__(self, first: int = 0, of: int = 1) -> None:
        self._next, self._of = -first, of

    def capture(self, work: Work, warm: Work) -> Work:
        """See `gpu.step.graphs.Launcher`."""
        if self._next % self._of == 0:
            warm()
        self._next += 1
        return work


def _cublas_gemm(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _cublas_fp8_gemm(x: Tensor, rows: Tensor, weight: Tensor, *others: object) -> Tensor:
    """The GEMM after quantisation."""
    dtype = others[-1]
    assert isinstance(dtype, torch.dtype)
    return torch.empty(len(x), len(weight), dtype=dtype)


def _to_float32(self: Linear, x: Tensor, ops: TritonOps | None = None) -> Tensor:
    out = torch.empty(len(x), len(self.matrix.weight))
    return out if ops is None else ops.add_lora(x, self.matrix.lora, out)


@contextmanager
def _no_library_gemms() -> Iterator[None]:
    """Skip GEMMs of libraries, which are not compiled here."""
    with (
        mock.patch.object(Linear, "seal", lambda self: None),  # a GPU's weights are not packed
        mock.patch.object(Linear, "to_float32", _to_float32),
        mock.patch("gpu.ops.fused.cublas_gemm", _cublas_gemm),
        mock.patch("gpu.ops.scaled.cublas_fp8_gemm", _cublas_fp8_gemm),
        # No kernel runs: what torch then reads as indices is in bounds.
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
        mock.patch.object(DraftStage, "measure", lambda *args: None),
        mock.patch.object(PeerRank, "apart", Rank.apart),  # there are no others
    ):
        yield


class Steps(NamedTuple):
    """Sizes and options of the server."""

    rows: int
    tokens: int
    page: int
    pdl: bool
    cascade_rows: int
    kv: torch.dtype | None = None
    """Dtype of the KV pages; None: the model's."""
    draft: Draft | None = None
    adapters: AdapterLimits | None = None
    ranks: int = 1

    @property
    def samples(self) -> int:
        """Tokens that a step may sample."""
        return most_samples(self.rows, self.tokens, self.drafts)

    @property
    def drafts(self) -> int:
        """Drafts of a row."""
        return 0 if self.draft is None else self.draft.most

    @property
    def trees(self) -> bool:
        """Whether drafts are trees."""
        return self.draft is not None and self.draft.tree is not None


def cut(model: Path, layers: int, dtype: str, fp8: Fp8) -> ModelSpec:
    """A spec with the first layers of a model, in 4 bits where the checkpoint is; `model` is a directory with
    a config.json."""
    spec = spec_of(model)
    windows = frozenset(layer for layer in spec.window_layers if layer < layers)
    dtype = dtype or spec.dtype
    spec = msgspec.structs.replace(spec, layers=layers, window_layers=windows, dtype=dtype, fp8=fp8)
    return spec if fp8 else msgspec.structs.replace(spec, int4=spec.stored_int4, mxfp4=spec.stored_mxfp4)


class Layers(NamedTuple):
    """How a model's layers run."""

    attention: AttentionBackend
    ops: Callable[[KvPool], Callable[[StepView], TritonOps]]


def layers_of(spec: ModelSpec, steps: Steps) -> Layers:
    """The layers of a server."""
    dtype, pdl = getattr(torch, spec.dtype), steps.pdl
    config = attention_config(spec, steps.page, steps.samples, dtype, CPU, DEVICE)
    config = config._replace(
        pdl=pdl,
        cascade_rows=steps.cascade_rows,
        query=1 + steps.drafts,
        trees=steps.trees,
        kv_scales=(1.0, 1.0) if steps.kv else None,
    )
    attention = PhasedAttention(TritonPrefill(config), TritonDecode(config))
    moe = None
    if (experts := spec.moe) is not None:
        sizes = experts.experts, experts.intermediate, spec.hidden, experts.per_token
        name = weight_name(experts_held(spec, experts), spec.dtype)
        moe = MoeConfigs(MoeShape(*sizes, name, DEVICE.name))

    def ops(pool: KvPool) -> Callable[[StepView], TritonOps]:
        counters = split_k_counters(CPU) if pdl else None
        kernels = Kernels(attention, pool.caches(), moe, pdl, config.kv_scales, counters, branch=Branch(CPU))
        return lambda view: TritonOps(view, kernels)

    return Layers(attention, ops)


def one_of(spec: ModelSpec, steps: Steps) -> PeerRank:
    """The first of the ranks."""
    limits = Exchanged(steps.tokens, spec.hidden, getattr(torch, spec.dtype), 1024, spec.vocab_size)
    group = PeerGroup(steps.ranks, torch.zeros(1, dtype=torch.int32))
    return peer_ranks(group, [CPU] * steps.ranks, limits)[0]


def drafter_of(spec: ModelSpec, steps: Steps) -> Callable[[SlotTables], Drafter] | None:
    """The drafter of a model of `spec`, if it has one."""
    if (draft := steps.draft) is None:
        return None
    dtype, run = getattr(torch, spec.dtype), None
    if (own := draft.layers) is not None:
        attention, ops = layers_of(msgspec.structs.replace(own, dtype=spec.dtype), steps)
        pages = pool_of(own, steps.kv or dtype, CPU)
        run = DraftMachine(attention, ops, pages, draft_kernels, steps.pdl)
    found = partial(look_up, pdl=steps.pdl)
    return make_drafter(draft, spec.context_length, steps.samples, dtype, CPU, run, found)


def launch_all(spec: ModelSpec, steps: Steps, launcher: PartLauncher) -> None:
    """Launch the launcher's part of the graphs that such a server captures, and its other kernels; within
    `compiling()`."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    rows, tokens, chunks = steps.rows, steps.tokens, min(steps.rows, MAX_CHUNKS)
    attention, plain = layers_of(spec, steps)
    ops: MakeOps = plain
    rank = None if steps.ranks == 1 else one_of(spec, steps)
    if rank is not None:
        ops = partial(with_rank, plain, PeerOps, rank, spec.vocab_size)
    padded = PaddedSizes(steps.samples, tokens, chunks, steps.drafts, steps.adapters)
    machine = Machine(
        CPU, padded, lambda: launcher, attention, ops, begin_step, triton_kernels, steps.pdl, rank
    )
    hidden = HiddenShape(spec.hidden, dtype)
    vocab, drafts, adapters = spec.vocab_size, steps.drafts, steps.adapters
    shape = Shape(rows, tokens, chunks, PAGES, steps.page, vocab, hidden, drafts, steps.trees, adapters)
    runner = ModelRunner(shape, machine, shape.entries(CPU), drafter=drafter_of(spec, steps))
    with (
        device_thread(CPU),
        _no_library_gemms(),
        mock.patch("gpu.weights.load.fill_dummy"),
        mock.patch("gpu.weights.draft.fill_dummy"),
    ):
        model = load_model(spec, None, dtype, CPU, shard=ALONE if rank is None else rank.shard)
        if spec.mxfp4 is not None:
            model.seal()
        if adapters is not None:
            layout = AdapterLayout([each.shape for each in model.adaptable], adapters, dtype)
            layout.bind(torch.empty(adapters.places, layout.bytes, dtype=torch.uint8), model.adaptable)
        runner.use_model(model if rank is None else RankModel(model, rank))
        heads = spec.kv_shape
        runner.use_pool(KvPool(spec.layers, PAGES, steps.page, heads, steps.kv or dtype, CPU))
        runner.prepare()


def compile_part(spec: ModelSpec, steps: Steps, first: int, of: int) -> dict[str, str]:
    """A line for each kernel of a part, by the hash of the kernel."""
    with compiling() as found:
        launch_all(spec, steps, PartLauncher(first, of))
    kernels = {kernel.hash: kernel for kernel in found}
    return {name: report(spec.architecture[:16], kernel) for name, kernel in kernels.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the steps of models and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", nargs="+", type=Path, help="directories with a config.json")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--cascade-rows", type=int, default=CASCADE_ROWS)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--dtype", default="", help="the model's own by default")
    parser.add_argument("--quantization", default="none", choices=FP8_KINDS)
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--draft", type=Path, help="a head or a small model that drafts, by its config.json")
    parser.add_argument("--algorithm", default="eagle3", help="of --draft; ngram needs none")
    parser.add_argument("--drafts", type=int, default=0, help="of a row; 0: as the draft model says")
    parser.add_argument("--branches", type=int, default=1, help="of a tree of drafts; 1: a chain")
    parser.add_argument("--adapters", type=int, default=0, help="rank of adapters in 8 places; 0: none")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that divide the model")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    kept = torch.float8_e4m3fn if args.kv_dtype == "fp8" else None
    steps = Steps(args.rows, args.tokens, args.page, not args.no_pdl, args.cascade_rows, kept)
    steps = steps._replace(ranks=args.ranks)
    if args.adapters:
        limits = AdapterLimits(places=8, max_rank=args.adapters, host=1, targets=TARGETS)
        steps = steps._replace(adapters=limits)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for model in args.models:
            began = time.monotonic()
            spec = cut(model, args.layers, args.dtype, FP8_KINDS[args.quantization]).shard(args.ranks)
            draft = None
            if args.draft is not None or args.algorithm == "ngram":
                tokens = args.drafts and 1 + args.drafts
                settings = SpeculativeConfig(algorithm=args.algorithm, num_draft_tokens=tokens)
                if args.branches > 1:
                    settings = replace(settings, eagle_topk=args.branches, num_steps=TREE_STEPS)
                draft = read_drafting(settings, args.draft, spec_of(model), True, spec_of)
            work = partial(compile_part, spec, steps._replace(draft=draft), of=args.jobs)
            every = {name: line for found in pool.map(work, range(args.jobs)) for name, line in found.items()}
            for line, count in sorted(Counter(every.values()).items()):
                print(f"{line}  x {count}" if count > 1 else line)
            print(f"{model}: {len(every)} kernels in {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
