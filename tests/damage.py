"""What can happen to a file: bits that flip, ends that are missing."""

from __future__ import annotations

import os
import random

# 5,000 take some minutes.
MUTATIONS = int(os.environ.get("EDGEDRAFT_TEST_MUTATIONS", 300))
_HEADER = 600  # bytes


def mutations(content: bytes, count: int, rng: random.Random) -> list[bytes]:
    """Return so many files that this one could have become; the first is as it was."""
    spoilt = [content, b"", b"\0", content[:-1], content + b"\0", content[len(content) // 2 :]]
    while len(spoilt) < count:
        # Half of it happens to the header, of which a fair share would see little.
        size = rng.choice([len(content), min(len(content), _HEADER)])
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 5, 50])):
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        cut = rng.choice([len(changed)] * 3 + [rng.randrange(size)])
        spoilt.append(bytes(changed[:cut]))
    return spoilt
