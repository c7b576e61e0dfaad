"""A draft with second thoughts: beside each token, what the drafter thought next likely there.

Where a target verifies trees, such a token costs a row of its pass and no step of the drafter, and
saves the round that the likeliest token would have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .datatypes import ROOT, Proposal
from .policy import reached
from .vocab_map import VocabMap


@dataclass(frozen=True, slots=True)
class _Node:
    token: int
    parent: int  # in the chain
    confidence: float
    reached: float
    place: int  # in the chain; rivals have none that anything follows


def branched(chain: Proposal, vocab_map: VocabMap, budget: int) -> Proposal:
    """Return a chain with its draft's rivals beside it, what is likeliest to be reached first:
    `budget` nodes at most.

    Only pieces that are a whole target token have one, and only where the rival is one, too.
    """
    if chain.draft is None or not chain.draft.rivals:
        return chain
    nodes: list[_Node] = []
    before = 1.0
    for i, probability in enumerate(reached(chain)):
        nodes.append(_Node(chain.tokens[i], i - 1, chain.confidence[i], probability, i))
        span = chain.spans[i]
        follows_alone = i + 1 == len(chain.spans) or chain.spans[i + 1].length > 0
        if span.length == 1 and follows_alone:
            piece, confidence = chain.draft.rivals[span.start]
            at = vocab_map.step(0, piece)
            token = vocab_map.finished(at) if at >= 0 else -1
            if token >= 0 and token != chain.tokens[i]:
                nodes.append(_Node(token, i - 1, confidence, before * confidence, ROOT))
        before = probability
    nodes.sort(key=lambda node: -node.reached)  # stable: a node comes behind the one it follows
    places: Mapping[int, int] = {
        node.place: at for at, node in enumerate(nodes) if node.place != ROOT
    } | {ROOT: ROOT}
    return replace(
        chain,
        tokens=tuple(node.token for node in nodes),
        parents=tuple(places[node.parent] for node in nodes),
        confidence=tuple(node.confidence for node in nodes),
        draft=None,
        spans=(),
    ).head(budget)
