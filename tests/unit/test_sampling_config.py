"""Keys of sampling and evaluation that contradict each other are refused."""

import pytest

from megagrpo.config import ConfigError, load_config

SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
REFUSED = {
    "data.curriculum_low=0.95": "data.curriculum_low: 0.95 is above data.curriculum_high 0.9; no prompt is inside; exchange them",
    "data.curriculum_high=2": "data.curriculum_high: Input should be less than or equal to 1 (got 2)",
    "algorithm.max_resample_times=0": "algorithm.max_resample_times: Input should be greater than 0 (got 0)",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_contradicts_itself_is_refused(override, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST)
    with pytest.raises(ConfigError) as caught:
        load_config(path, override.split())
    assert str(caught.value).split("\n  ")[1:] == [REFUSED[override]]
