"""Random numbers keyed by what is drawn, not by when: the same (seed, position) gives the same number in any company.

A counter-based generator: batch, chunking, preemption and device can't change a draw, as none of them is in the key.
"""

import struct
from hashlib import blake2b

MASK_64 = (1 << 64) - 1


def keyed_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a hash of (seed, position). Any 64-bit seed, signed or not."""
    key = struct.pack("<QQ", seed & MASK_64, position & MASK_64)
    bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11
    return float(bits * 2.0**-53)
