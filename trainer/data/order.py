"""The random order of the samples, which depends on nothing but its arguments.

Nothing here knows how many ranks there are; split.py assigns the samples to ranks.
"""

import hashlib

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts; unlike sums, (1, 2) and (2, 1) differ."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Indices 0..count-1 as int64, shuffled by seed and epoch alone."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(count, generator=generator)
