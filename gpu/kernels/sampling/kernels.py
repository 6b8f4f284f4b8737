"""`gpu.sample.kernels.SamplingKernels` for a GPU."""

from gpu.kernels.paths import move_paths
from gpu.kernels.sampling.adjust import adjust, mask_rows
from gpu.kernels.sampling.penalty import penalise, start_counts
from gpu.kernels.sampling.sample import choose
from gpu.kernels.sampling.score import best_tokens, score
from gpu.kernels.step import accept
from gpu.sample.weights import draw_weights

__all__ = [
    "accept",
    "adjust",
    "best_tokens",
    "choose",
    "draw_weights",
    "mask_rows",
    "move_paths",
    "penalise",
    "score",
    "start_counts",
]
