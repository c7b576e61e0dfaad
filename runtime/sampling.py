"""From one logits row to one token.

The draw is *coupled*: the noise of a position depends on the seed and the position alone, so plain
decoding and any speculative decoding choose the same token from the same row (Gumbel-max trick;
Daliri et al., arXiv 2408.07978, use the same noise for drafter and target). It is a hash, so that
only the tokens that can be drawn need any. A row is processed with exactly the history that plain
decoding would have had, which is why the sampler is told of every committed token.

Order of operations, as in transformers: repetition penalty, presence and frequency penalty, bias,
bans, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .config import SamplingConfig
from .datatypes import FloatArray

# The nucleus is looked for among tokens this many nats under the best one first; sorting a whole
# vocabulary costs as much as a model layer.
_NUCLEUS_GUESS = 8.0
_GOLDEN = 0x9E3779B97F4A7C15  # of SplitMix64
_MASK = (1 << 64) - 1


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
        gumbel = -np.log(-np.log(noise(self._config.seed, position, ids)))
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
        best = scores.max()
        ids: npt.NDArray[np.intp] | None = None  # all
        if 0 < c.top_k < scores.size:
            # Ties at the border stay in: which of them a partition returns is not defined.
            border = np.partition(scores, -c.top_k)[-c.top_k]
            ids = np.flatnonzero(scores >= border)
        if c.top_p < 1:
            ids = _nucleus(ids, scores if ids is None else scores[ids], best, c)
        if ids is None:
            # A little less than min-p asks for, which is decided below in double precision.
            least = best + c.temperature * np.log(c.min_p) - 0.1 if c.min_p > 0 else -np.inf
            ids = np.flatnonzero(scores >= least)
        log_weights = (scores[ids].astype(np.float64) - float(best)) / c.temperature
        if c.min_p > 0:
            kept = log_weights >= np.log(c.min_p)
            ids, log_weights = ids[kept], log_weights[kept]
        return ids, log_weights


def noise(seed: int, position: int, ids: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Return numbers in (0, 1), one for each id, that depend on nothing but seed, position and id
    (SplitMix64: Steele et al., OOPSLA 2014, with its two arguments mixed one after the other).
    """
    stream = _mix(np.array([seed + _GOLDEN & _MASK], np.uint64))
    stream = _mix(stream + np.uint64((position + 1) * _GOLDEN & _MASK))
    bits = ids.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(_GOLDEN)
    bits += stream
    _mix(bits)
    bits >>= np.uint64(11)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    return uniform


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble numbers in place, since a vocabulary of them is half a megabyte to move."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _nucleus(
    ids: npt.NDArray[np.intp] | None, scores: FloatArray, best: np.float32, c: SamplingConfig
) -> npt.NDArray[np.intp]:
    """Return the smallest set of most probable ids with mass `top_p`, in ascending order; `scores`
    are those of the ids, None for all of them.
    """
    weights = np.exp((scores - best) / np.float32(c.temperature))
    goal = c.top_p * weights.sum(dtype=np.float64)
    guess = np.flatnonzero(weights >= np.exp(-_NUCLEUS_GUESS))
    if weights[guess].sum(dtype=np.float64) < goal:
        guess = np.arange(weights.size)
    # A stable order makes ties fall the same way whoever was guessed.
    order = guess[np.argsort(-weights[guess], kind="stable")]
    count = int(np.searchsorted(weights[order].cumsum(dtype=np.float64), goal)) + 1
    chosen = np.sort(order[:count])
    return chosen if ids is None else ids[chosen]
