"""Stated probabilities become counted ones."""

from __future__ import annotations

import numpy as np
import pytest

from edgedraft.runtime.calibration import Calibration
from edgedraft.runtime.datatypes import Proposal


@pytest.mark.parametrize("stated", [0.03, 0.3, 0.55, 0.72, 0.93, 0.99])
def test_at_first_what_is_stated_is_believed(stated: float) -> None:
    assert abs(Calibration().calibrated(stated) - stated) < 0.06


def test_the_rate_follows_what_happened_and_forgets_what_no_longer_does() -> None:
    calibration = Calibration()
    rng = np.random.default_rng(0)
    for rate in (0.3, 0.8):
        for at in range(400):
            calibration.expect(at, Proposal.chain([1], [0.95], ""))
            calibration.score([0] * at + [int(rng.random() < rate)])
        assert abs(calibration.calibrated(0.95) - rate) < 0.2
    assert calibration.calibrated(0.55) == pytest.approx(0.55)


def test_tokens_behind_the_first_wrong_one_do_not_count() -> None:
    calibration = Calibration()
    calibration.expect(1, Proposal.chain([5, 6, 7], [0.95, 0.55, 0.25], ""))
    calibration.score([9, 5, 8, 7])
    assert calibration.calibrated(0.95) > 0.94
    assert calibration.calibrated(0.55) < 0.5
    assert calibration.calibrated(0.25) == 0.25


def test_what_is_not_committed_yet_does_not_count() -> None:
    calibration = Calibration()
    calibration.expect(3, Proposal.chain([5], [0.95], ""))
    calibration.score([1, 2, 3])
    calibration.score([1, 2, 3, 4])
    assert calibration.calibrated(0.95) == Calibration().calibrated(0.95)


def test_of_a_tree_what_lies_on_the_way_counts_siblings_included() -> None:
    calibration = Calibration()
    #      5 - 7
    #    6 - 8         and the text says 6, 9
    tree = Proposal((5, 6, 7, 8), (-1, -1, 0, 1), (0.55, 0.35, 0.95, 0.75), "")
    calibration.expect(1, tree)
    calibration.score([0, 6, 9])
    assert calibration.calibrated(0.55) < 0.55 and calibration.calibrated(0.35) > 0.35
    assert calibration.calibrated(0.75) < 0.75
    assert calibration.calibrated(0.95) == Calibration().calibrated(0.95)
