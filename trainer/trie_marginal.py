"""A target's next-token distribution as one over the drafter's next piece.

While the drafter spells one target token, with the pieces `pi` written so far, the target's
probabilities p(t) say what the next piece should be:

    ptilde(d | pi) = sum of p(t) over tokens spelled pi, d, ...
                     / sum of p(t) over tokens whose spelling is longer than pi and begins with it

So a divergence between drafter and target makes sense at every piece, whatever the vocabularies.
At the first piece this is a plain sum over what each token begins with. For a target that is sure
of its token it is that token's own spelling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


def trie_marginal(
    spellings: Sequence[Sequence[int]], probs: npt.NDArray[np.float32], pieces: Sequence[int]
) -> list[Mapping[int, float]]:
    """Return ptilde before each of the `pieces` that spell the true token.

    `probs[i]` is the target's probability of the token spelled `spellings[i]`. Where none of these
    tokens begins with the pieces so far, all of ptilde is on the piece that comes.
    """
    marginals: list[Mapping[int, float]] = []
    for depth, piece in enumerate(pieces):
        before = list(pieces[:depth])
        mass: dict[int, float] = {}
        for spelling, prob in zip(spellings, probs, strict=True):
            if len(spelling) > depth and list(spelling[:depth]) == before:
                mass[spelling[depth]] = mass.get(spelling[depth], 0.0) + float(prob)
        total = sum(mass.values())
        marginals.append({d: m / total for d, m in mass.items()} if total > 0 else {piece: 1.0})
    return marginals
