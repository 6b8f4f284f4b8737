"""The randomness of a token: a hash of (seed, absolute position, token id), and nothing else.

Counted state (a generator, a step number) would make the text depend on batching, retraction,
chunking and speculation. Here every token of every position owns its noise before anything runs.

All arithmetic is on 32-bit words that wrap: uint32 for a row's keys, int32 for its tokens because
torch's uint32 has few operators; a kernel uses uint32. `_mix` and its multipliers M1, M2 are the
finaliser that Wellons' "hash prospector" found (xor-shifts 16, 15, 16). G, A, B are the fraction bits
of the golden ratio and of the square roots of 2 and 3.

    key0 = mix(mix(mix(A ^ seed_low) ^ seed_high) ^ position), key1 the same from B
    x = token * G + key0
    x = (x ^ x >>> 16) * M1
    x = x ^ key1
    x = (x ^ x >>> 15) * M2
    x = x ^ x >> 16          (arithmetic: bit 31 becomes 0, bits 0 to 30 stay uniform)

Two keys, because with one of 32 bits rows would meet by the birthday rule after 65,000 draws, and
two rows whose keys differ by a multiple of G would carry shifted copies of one noise.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_M1 = np.uint32(0x7FEB352D)
_M2 = np.uint32(0x846CA68B)
_G = np.uint32(0x9E3779B9)
_INT_M1, _INT_M2, _INT_G = (int(word.view(np.int32)) for word in (_M1, _M2, _G))
_START = np.array([0x6A09E667, 0xBB67AE85], np.uint32)


def row_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
    """Keys int32 [n, 2] of rows with `seeds`, `positions` [n], both in [0, 2**63).

    For one seed no two positions below 2**32 share a key, and for one position no two seeds that
    differ in one half only; other pairs collide with probability 2**-64.
    """
    keys = _mix(_START ^ _low(seeds))
    keys = _mix(keys ^ _low(seeds >> 32))
    return torch.from_numpy(_mix(keys ^ _low(positions)).view(np.int32))


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """31 uniform bits, int32 [..., m], of `tokens` int32 [..., m] under `keys` int32 [..., 2]."""
    x = tokens * _INT_G + keys[..., :1]
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_INT_M1)
    x.bitwise_xor_(keys[..., 1:])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_INT_M2)
    return x.bitwise_xor_(x >> 16)


def exponential(bits: Tensor) -> Tensor:
    """Unit-rate exponential variates E, float32, of what `bits` gave; same shape.

    E = -log1p(-v), v = (bits + 0.5) / 2**31. Small E decide races, and there float32 keeps v to 24
    significant bits down to its least value 2**-32; v is clamped to 1 - 2**-24 above, where it
    would round to 1. So E lies in [2.3e-10, 16.64], never 0 or infinite, and the Gumbel variate
    -log(E) in [-2.81, 22.18]: an event less likely than 2**-31 is not resolved.
    """
    v = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_()


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Bijection of words in which each input bit flips each output bit about half the time."""
    x = (x ^ (x >> np.uint32(16))) * _M1
    x = (x ^ (x >> np.uint32(15))) * _M2
    return x ^ (x >> np.uint32(16))


def _low(values: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The low words of `values` [n], as a column."""
    return (values & 0xFFFFFFFF).astype(np.uint32)[:, None]
