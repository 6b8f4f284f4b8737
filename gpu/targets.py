"""Which devices the ranks of a replica run on, and how they meet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from core.config import ModelConfig, ParallelConfig
from core.env import load_cuda_modules_eagerly
from core.errors import ConfigError
from core.models import ModelSpec
from gpu.attention.registry import check_cpu_backends
from gpu.device import CudaFacts, check_gpus, choose_device, cuda_facts, multiplies_bfloat16
from gpu.draft.build import Draft
from gpu.nodes.gloo import gloo_ranks
from gpu.nodes.join import Nodes
from gpu.nodes.nccl import nccl_ranks
from gpu.parts import Target
from gpu.prompt import POSITIONS
from gpu.ranks import Rank, RankGroup, make_ranks
from gpu.step.shapes import most_samples
from gpu.weight_formats import is_quantised

log = logging.getLogger(__name__)

THREADS = torch.get_num_threads()
"""Threads of products on a CPU, which its ranks share."""


class MostExchanged(NamedTuple):
    """The maximum of a step."""

    rows: int
    tokens: int


def device_of_node(model: ModelConfig, parallel: ParallelConfig) -> str:
    """The name of what this node computes on. Raises `ConfigError` for several GPUs of one process."""
    facts, local = _facts(model, parallel, 0), parallel.local_ranks
    if facts.reason:
        return "a CPU"
    if local > 1:
        raise ConfigError(
            f"--tp {parallel.tp} with --nnodes {parallel.nnodes} gives each process {local} GPUs, and it can "
            f"have one: start {local} processes on each host, with --nnodes {parallel.tp} in all (torchrun "
            f"--nproc-per-node {local})."
        )
    return facts.name


def _facts(model: ModelConfig, parallel: ParallelConfig, replica: int) -> CudaFacts:
    if model.device == "cpu":
        return CudaFacts("none was asked for")
    if parallel.tp > 1:
        load_cuda_modules_eagerly()
    check_gpus(parallel)
    return cuda_facts(parallel.gpu(replica))


def choose_targets(
    spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig, replica: int
) -> Sequence[Target]:
    """The target of each rank of a replica: a GPU of its own, or the CPU that all share. Raises
    `ConfigError`."""
    facts = _facts(model, parallel, replica)
    local = range(parallel.local_ranks)
    devices = [choose_device(model.device, facts, parallel.gpu(replica, rank)) for rank in local]
    if devices[0].type == "cpu":
        torch.set_num_threads(model.threads or THREADS)
    if model.device == "auto" and facts.reason:
        log.info("on the CPU: %s", facts.reason)
    dtype = choose_dtype(model, spec, devices[0])
    targets = [Target(device, dtype, facts) for device in devices]
    if not targets[0].captures(spec):
        check_cpu_backends(model.attention_backend)
    return targets


def choose_dtype(model: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Choose the dtype of the computation by the settings. "auto" on a GPU is what the checkpoint says, but
    bfloat16 for text generation from float32, which is also what a checkpoint counts as that says nothing:
    GGUF files of 4 bits, say. A step of SmolLM2-135M takes twice as long in float32 on an H200.

    On a CPU it is float32, as of quantised checkpoints, whose matrices have 8 bits there; bfloat16 for text
    generation from it where the CPU multiplies it: 1.5 times the tokens of 1 stream, 1.8 of 8, 3.2 of prompts
    (`python -m bench.cpu --dtypes`)."""
    name: str = model.dtype
    if name == "auto" and device.type == "cpu":
        plain = not is_quantised(spec) and not spec.transformers and model.quantization in ("auto", "none")
        fits = plain and spec.task == "generate" and spec.dtype == "bfloat16"
        name = "bfloat16" if fits and multiplies_bfloat16() else "float32"
    elif name == "auto":
        name = "bfloat16" if spec.dtype == "float32" and spec.task == "generate" else spec.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_ranks(
    targets: Sequence[Target], spec: ModelSpec, most: MostExchanged, draft: Draft | None, nodes: Nodes | None
) -> tuple[RankGroup | None, Sequence[Rank | None]]:
    """The group through which ranks synchronise, and a rank for each target; (None, [None]) for one target
    alone.

    `spec` is the whole model's. On GPUs of one process this allocates the buffers of the collectives. Raises
    `ConfigError` for GPUs without peer access, and `EngineFailed` where other nodes are gone."""
    device, dtype, _ = targets[0]
    if device.type == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // len(targets), 1))
    if nodes is not None:
        return gloo_ranks(nodes) if device.type == "cpu" else nccl_ranks(nodes, device)
    if len(targets) == 1:
        return None, [None]
    if device.type == "cpu":
        return make_ranks(len(targets))
    rows, tokens = most
    from gpu.peers import Exchanged, make_peers  # Triton, which a CPU may not have

    drafts, branches = (0, 1) if draft is None else (draft.most, draft.settings.eagle_topk)
    samples = max(most_samples(rows, tokens, drafts), rows * branches, POSITIONS)
    limits = Exchanged(tokens, spec.hidden, dtype, samples, spec.vocab_size)
    return make_peers([target.device for target in targets], limits)
