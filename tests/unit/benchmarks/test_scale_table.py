"""The table and the warm-up rule of the benchmarks without a GPU: slopes, marks of computed rows, agreement of steps."""

import pytest

from benchmarks.repeats import MOST_WARM_UPS, is_warm, spread, warm_up_text, with_range
from benchmarks.scaling.table import Point, Series, bytes_text, draw, fitted_slope, lines_of, seconds_text


def test_the_slope_is_the_power_of_the_size_and_computed_points_do_not_count():
    assert fitted_slope([10, 100, 1000], [3e-6 * size**1.5 for size in (10, 100, 1000)]) == pytest.approx(1.5)
    assert fitted_slope([10, 10], [1.0, 2.0]) is None
    series = Series("a", "b", "samples", [Point(10, 1.0), Point(1000, 100.0), Point(10**6, 1.0, computed=True)])
    assert series.slope == pytest.approx(1.0)
    assert lines_of(series) == [
        "| a | b | 10 samples | 1 s |  |  |  |",
        "| a | b | 1,000 samples | 100 s |  | 1.00 |  |",
        "| a | b | 1,000,000 samples | 1 s |  |  | computed |",
    ]


def test_numbers_have_three_digits_and_a_unit():
    assert [seconds_text(value) for value in (1234.5, 61.26, 0.0123, 4.5e-6)] == [
        "1,234 s",
        "61.3 s",
        "12.3 ms",
        "4.5 us",
    ]
    assert [bytes_text(value) for value in (12, 1.5e3, 2e6, 3.456e9, 7e12)] == [
        "12 B",
        "1.5 kB",
        "2 MB",
        "3.46 GB",
        "7 TB",
    ]


def test_a_warm_up_ends_when_two_steps_in_a_row_agree_or_after_the_most():
    assert not is_warm([]) and not is_warm([1.0]) and is_warm([1.0, 1.03]) and is_warm([1.03, 1.0])
    assert not is_warm([2.0, 1.0, 1.5]) and is_warm([2.0, 1.0, 1.01])
    restless = [1.0 + i % 2 for i in range(MOST_WARM_UPS)]
    assert not is_warm(restless[:-1]) and is_warm(restless)
    assert (warm_up_text([1.0, 1.01]), warm_up_text(restless)) == ("2", f"{MOST_WARM_UPS}!")
    assert spread([1.0, 2.0, 3.0]) == 1.0 and with_range([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"


def test_a_plot_shows_computed_points_hollow(tmp_path):
    points = [Point(10, 1.0, 100), Point(1000, 10.0, 1000, computed=True)]
    draw([Series("a", "b", "samples", points), Series("c", "d", "ranks", points)], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "<svg" in text and "#ffffff" in text
