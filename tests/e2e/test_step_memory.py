"""The host memory of a run on four ranks (dp 2 x pp 2) with 2,000 responses of 512 tokens grows as the plan says."""

import pytest

from benchmarks.scaling.planned import growth


@pytest.mark.full
def test_the_peak_memory_of_a_rank_grows_with_the_samples_as_planned(tmp_path):
    for who, (planned, measured, _) in growth(tmp_path, 50, 500).items():
        assert measured == pytest.approx(planned, rel=0.3), (
            f"{who}: {measured / 1e6:.1f} MB, planned {planned / 1e6:.1f}"
        )
