"""Permutations that need no memory: a keyed bijection of range(size), computed element by element.

A Feistel network over the smallest power of two that holds `size`, walked until it lands inside (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: cycle walking keeps it a bijection). Its round
function is the finalizer of splitmix64.
"""

from __future__ import annotations

import numpy as np

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_ROUNDS = 8


def make_key(*parts: int) -> int:
    """A 64-bit key of several integers, in their order."""
    key = len(parts)
    for part in parts:
        key = mix_one(key * _GOLDEN + part)
    return key


def mix_one(x: int) -> int:
    """`mix` of one integer, of which the low 64 bits count."""
    x = (x + _GOLDEN) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB & _MASK
    return x ^ (x >> 31)


def mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of the input moves every bit of the output. uint64 to uint64."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def bijection(values: np.ndarray, size: int, keys: int | np.ndarray) -> np.ndarray:
    """Where a permutation of range(size) takes `values`.

    Args:
        values: int64[n], each in range(size).
        keys: the key of the permutation, or one for each value, uint64[n].

    Returns:
        int64[n]; for one key, different values have different results.
    """
    keys = np.broadcast_to(np.asarray(keys, dtype=np.uint64), values.shape)
    result = values.astype(np.uint64)
    if size == 1:
        return values.copy()
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        result[outside] = _network(result[outside], size, keys[outside])
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _network(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    bits = max(2, (size - 1).bit_length())
    num_low = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> num_low, values & low_mask
    for turn in range(_ROUNDS):
        key = keys + np.uint64(turn * _GOLDEN & _MASK)
        if turn % 2:
            high = high ^ (mix(low ^ mix(key)) & high_mask)
        else:
            low = low ^ (mix(high ^ mix(key)) & low_mask)
    return (high << num_low) | low
