"""`gpu.sample.kernels.SamplingKernels` for a GPU."""

from gpu.kernels.paths import move_paths
from gpu.kernels.sampling.adjust import adjust, mask_rows
from gpu.kernels.sampling.penalty import penalise, start_counts
from gpu.kernels.sampling.sample import choose
from gpu.kernels.step import accept
from gpu.sample.weights import draw_weights

__all__ = [
    "accept",
    "adjust",
    "choose",
    "draw_weights",
    "mask_rows",
    "move_paths",
    "penalise",
    "start_counts",
]
