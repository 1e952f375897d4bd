"""The host memory of a run on four ranks (dp 2 x pp 2) with 2,000 responses of 512 tokens grows as the plan says."""

import pytest

from benchmarks.scaling.planned import Compared, memory_growth


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict[str, Compared]:
    """Bytes planned and measured, for 2,000 responses beyond 200, of a leader and of a rank of the last stage."""
    return memory_growth(tmp_path_factory.mktemp("memory"), 50, 500)


@pytest.mark.full
@pytest.mark.parametrize("who", ["leader", "rank"])
def test_the_peak_memory_of_a_rank_grows_with_the_samples_as_planned(grown, who):
    planned, measured = grown[who]
    assert measured == pytest.approx(planned, rel=0.3), f"{measured / 1e6:.1f} MB, planned {planned / 1e6:.1f}"
