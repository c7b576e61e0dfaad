"""From one logits row to one token.

The draw is *coupled*: the noise of a position depends on the seed and the position alone, so plain
decoding and any speculative decoding choose the same token from the same row (Gumbel-max trick;
Daliri et al., arXiv 2408.07978, use the same noise for drafter and target). A row is processed with
exactly the history that plain decoding would have had, which is why the sampler is told of every
committed token.

Order of operations, as in transformers: repetition penalty, presence and frequency penalty, bias,
bans, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .config import SamplingConfig
from .datatypes import FloatArray

# The nucleus is looked for among this many best tokens first; sorting a whole vocabulary costs as
# much as a model layer.
_NUCLEUS_GUESS = 512


class Sampler:
    """Chooses tokens for one request; knows the tokens chosen so far when penalties need them."""

    def __init__(self, config: SamplingConfig, prompt: Sequence[int], vocab_size: int) -> None:
        """Raise `ValueError` when a biased or banned token is not in the vocabulary."""
        self._config = config
        special = {**config.logit_bias, **dict.fromkeys(config.banned_tokens, -np.inf)}
        for token in special:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"token {token} is biased or banned, but ids must be in [0, {vocab_size})"
                )
        self._bias_ids = np.fromiter(special, dtype=np.intp, count=len(special))
        self._bias = np.fromiter(special.values(), dtype=np.float32, count=len(special))
        self._seen = np.zeros(vocab_size if config.has_penalties else 0, dtype=bool)
        self._output_counts = np.zeros(self._seen.size, dtype=np.float32)
        if config.has_penalties:
            self._seen[[t for t in prompt if t < vocab_size]] = True

    def commit(self, token: int) -> None:
        """Take note of a token that is now part of the output."""
        if self._config.has_penalties:
            self._seen[token] = True
            self._output_counts[token] += 1

    def choose(self, logits: FloatArray, position: int) -> int:
        """Choose the token at `position` of the sequence from its logits row, shape (vocab,)."""
        scores = self._adjusted(logits)
        if self._config.temperature == 0:
            return int(scores.argmax())
        ids, log_weights = self._truncated(scores)
        key = np.random.Philox(key=self._config.seed, counter=[0, position, 0, 0])
        uniform = np.random.Generator(key).random(logits.size)[ids]
        with np.errstate(divide="ignore"):
            gumbel = -np.log(-np.log(uniform))
        return int(ids[(log_weights + gumbel).argmax()])

    def probabilities(self, logits: FloatArray) -> npt.NDArray[np.float64]:
        """Return the distribution that `choose` draws from, shape (vocab,), given the history so
        far.
        """
        scores = self._adjusted(logits)
        out = np.zeros(logits.size)
        if self._config.temperature == 0:
            out[scores.argmax()] = 1
            return out
        ids, log_weights = self._truncated(scores)
        out[ids] = np.exp(log_weights - log_weights.max())
        out /= out.sum()
        return out

    def _adjusted(self, logits: FloatArray) -> FloatArray:
        """Apply penalties, bias and bans; the row itself is left alone."""
        c = self._config
        if not c.has_penalties and not self._bias_ids.size:
            return logits
        scores = logits.copy()
        if c.has_penalties:
            seen = np.flatnonzero(self._seen)
            values = scores[seen]
            # Dividing a negative score would make a repeated token more likely, hence the two
            # cases.
            scores[seen] = np.where(
                values > 0, values / c.repetition_penalty, values * c.repetition_penalty
            )
            counts = self._output_counts
            scores -= c.frequency_penalty * counts + c.presence_penalty * (counts > 0)
        scores[self._bias_ids] += self._bias
        if not np.isfinite(scores.max()):
            raise ValueError("every token is banned: remove entries of banned_tokens or logit_bias")
        return scores

    def _truncated(
        self, scores: FloatArray
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Return the ids that survive top-k, top-p and min-p, and their log weights."""
        c = self._config
        log_weights = (scores.astype(np.float64) - float(scores.max())) / c.temperature
        ids = np.arange(scores.size)
        if 0 < c.top_k < ids.size:
            # Ties at the border stay in: which of them a partition returns is not defined.
            border = np.partition(log_weights, -c.top_k)[-c.top_k]
            ids = ids[log_weights >= border]
        if c.top_p < 1:
            ids = _nucleus(ids, log_weights, c.top_p)
        if c.min_p > 0:
            ids = ids[log_weights[ids] >= np.log(c.min_p)]
        return ids, log_weights[ids]


def _nucleus(
    ids: npt.NDArray[np.intp], log_weights: npt.NDArray[np.float64], top_p: float
) -> npt.NDArray[np.intp]:
    """Return the smallest set of most probable ids with mass `top_p`, in ascending order."""
    weights = np.exp(log_weights[ids])
    goal = top_p * weights.sum()
    best = np.arange(ids.size)
    if ids.size > _NUCLEUS_GUESS:
        guess = np.argpartition(weights, -_NUCLEUS_GUESS)[-_NUCLEUS_GUESS:]
        if weights[guess].sum() >= goal:
            best = guess
    # A stable order makes ties fall the same way whatever the partition did.
    order = best[np.lexsort((best, -weights[best]))]
    count = int(np.searchsorted(weights[order].cumsum(), goal)) + 1
    return np.sort(ids[order[:count]])
