"""Rows with their own sampling parameters: read from a column, checked, sent with requests, and packed."""

import json
import math

import numpy as np
import pytest
import torch

from megagrpo.algorithms.advantages import to_samples
from megagrpo.config import DataSection
from megagrpo.data.packing import PackingRules, build_micro_batch
from megagrpo.data.prompts import PromptSource
from megagrpo.data.step_samples import StepSamples
from megagrpo.engine.requests import GroupRequest, own_sampling
from megagrpo.train_types import TrainSample
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout
from tests.unit.data.test_prompts import tokenizer  # noqa: F401 (a fixture)


def source(tokenizer, path, cells, key="data.train"):  # noqa: F811
    path.write_text("".join(json.dumps({"prompt": "Hi", "own": cell}) + "\n" for cell in cells))
    data = DataSection(train={"source": str(path)}, sampling_column="own")
    return PromptSource(data.train, data, tokenizer, 100, 0, key, max_completion_length=20)


def test_a_cell_is_a_mapping_or_its_json_text_or_empty(tokenizer, tmp_path):  # noqa: F811
    cells = [{"temperature": 0.5, "max_tokens": None}, None, json.dumps({"max_tokens": 20})]
    prompts = source(tokenizer, tmp_path / "rows.jsonl", cells).all()
    assert [prompt.sampling for prompt in prompts] == [{"temperature": 0.5}, {}, {"max_tokens": 20}]
    held_out = source(tokenizer, tmp_path / "rows.jsonl", cells, "data.eval").all()
    assert [prompt.sampling for prompt in held_out] == [{}, {}, {}]  # evaluation has its own parameters


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ({"temprature": 1.0}, "has `temprature`; did you mean `temperature`"),
        ("hot", "must be a mapping of sampling parameters (got 'hot')"),
        ({"temperature": 0}, "temperature: Input should be greater than or equal to 0.01 (got 0)"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2 (got 3)"),
        ({"temperature": True}, "temperature: Value error, must be a number, not true or false (got True)"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than 0 (got 0)"),
        ({"max_tokens": 21}, "max_tokens 21 is above rollout.max_completion_length 20; lower it"),
    ],
)
def test_parameters_that_no_request_can_have_are_refused(cell, problem, tokenizer, tmp_path):  # noqa: F811
    with pytest.raises(ValueError) as error:
        source(tokenizer, tmp_path / "rows.jsonl", [None, cell])
    assert "data.train: row 1: column `own` (data.sampling_column)" in str(error.value)
    assert problem in str(error.value)


def test_a_missing_column_is_named(tokenizer, tmp_path):  # noqa: F811
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Hi", "won": None}))
    data = DataSection(train={"source": str(tmp_path / "rows.jsonl")}, sampling_column="own")
    with pytest.raises(ValueError, match=r"data\.sampling_column: data\.train has no column `own`"):
        PromptSource(data.train, data, tokenizer, 100, 0)


def test_a_request_has_the_parameters_of_its_row():
    sampling = SamplingParams(temperature=1.0, max_tokens=10)
    request = GroupRequest(Prompt(0, (1,), "", sampling={"temperature": 0.5, "max_tokens": 4}), 1, sampling, 0, 0)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 4)
    # a conversation with less room than the row's limit
    assert own_sampling(request.prompt, SamplingParams(1.0, 3)).max_tokens == 3
    assert own_sampling(Prompt(0, (1,), ""), sampling) is sampling


@pytest.mark.parametrize("share", [False, True], ids=["own prompts", "shared prompts"])
def test_packing_carries_temperatures_only_if_a_row_has_one(share):
    def sample(temperature):
        mask = torch.tensor([False, False, True, True])
        return TrainSample(torch.arange(4), mask, torch.zeros(4), 1.0, temperature=temperature)

    rules = PackingRules(100, share_prompts=share, align=4)
    assert build_micro_batch([sample(None), sample(None)], rules).temperatures is None
    batch = build_micro_batch([sample(None), sample(0.5), sample(2.0)], rules)
    own = batch.temperatures[batch.loss_mask]
    assert [None if math.isnan(t) else t for t in own.tolist()] == [None, None, 0.5, 0.5, 2.0, 2.0]


def test_temperatures_of_drawn_samples_join_those_of_earlier_ones():
    """Dynamic sampling: the first round has no row with its own temperature."""

    def drawn(*temperatures):
        prompts = [
            Prompt(i, (1,), "", sampling={} if t is None else {"temperature": t}) for i, t in enumerate(temperatures)
        ]
        return [ScoredRollout(Rollout(p, [2], [-1.0], "stop", 0, ""), {"f": 1.0}, 1.0) for p in prompts]

    first, second = StepSamples.of(drawn(None, None)), StepSamples.of(drawn(0.5, None))
    assert first.temperatures == [None, None] and "temperature" not in first.facts.dtype.names
    assert (first + second).temperatures == [None, None, 0.5, None]
    assert (first + second).select(np.array([2, 0])).temperatures == [0.5, None]
    assert [s.temperature for s in to_samples(drawn(0.5, None), torch.ones(1, 2))] == [0.5, None]
