"""What runs the launches of steps: a device, and the kernels and sizes that it takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from gpu.attention import AttentionBackend
from gpu.kv.pool import KvPool
from gpu.ops.base import Ops
from gpu.ops.delta import gated_delta
from gpu.ranks import Rank
from gpu.sample.kernels import SamplingKernels
from gpu.state.recurrent import DeltaRule
from gpu.state.view import StepView
from gpu.step.begin import BeginStep
from gpu.step.graphs import Launcher
from gpu.step.steps import StepSizes


class Machine(NamedTuple):
    """How steps are run.

    sizes     of the launches: padded for graphs, or exact
    launcher  makes graphs; None where work is called in exact sizes
    ops       of each step's layers, over the pages of a pool
    begin     the first kernel of a step
    sampling  the last ones
    pdl       programmatic dependent launch
    rank      which of several this is
    paced     the costs of chunks are to be measured
    delta     linear attention
    ahead     a context in which kernels are compiled in parallel and not launched; None: there is none
    """

    device: torch.device
    sizes: StepSizes
    launcher: Callable[[], Launcher] | None
    attention: AttentionBackend
    ops: Callable[[KvPool], Callable[[StepView], Ops]]
    begin: BeginStep
    sampling: SamplingKernels
    pdl: bool = False
    rank: Rank | None = None
    paced: bool = False
    delta: DeltaRule = gated_delta
    ahead: Callable[[], AbstractContextManager[None]] | None = None
