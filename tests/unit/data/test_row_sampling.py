"""Rows with their own sampling parameters: read from a column, checked, sent with requests, and packed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megagrpo.algorithms.advantages import to_samples
from megagrpo.config import DataSection
from megagrpo.config.io import validated
from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.prompts import PromptSource
from megagrpo.data.teacher_prompts import _asked
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.sampling import of_row, own_sampling, sampling_row
from megagrpo.engine.client import _seed_of_group
from megagrpo.engine.requests import GroupRequest, sampling_params
from megagrpo.records.rows.packed_groups import packed, unpacked
from megagrpo.train_types import TrainSample
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout, Thinking
from tests.unit.data.test_prompts import tokenizer  # noqa: F401 (a fixture)
from tests.unit.for_each import for_each


def run(*overrides):
    sections = dict(model={"path": "m"}, rewards={"functions": [{"function": "exact_number"}]})
    settings = dict(
        data={"train": {"source": "a.jsonl"}, "sampling_column": "own"}, rollout={"max_completion_length": 20}
    )
    return validated(sections | settings, overrides, "test")


def source(tokenizer, path, cells, key="data.train", overrides=()):  # noqa: F811
    path.write_text("".join(json.dumps({"prompt": "Hi", "own": cell}) + "\n" for cell in cells))
    config = run(f"data.train.source={path}", *overrides)
    return PromptSource(config.data.train, config.data, tokenizer, 100, 0, key, row_reader=RowReader(config, tokenizer))


def test_a_cell_is_a_mapping_or_its_json_text_or_empty(tokenizer, tmp_path):  # noqa: F811
    cells = [{"temperature": 0.5, "max_tokens": None}, None, json.dumps({"max_tokens": 20})]
    prompts = source(tokenizer, tmp_path / "rows.jsonl", cells).all()
    assert [prompt.sampling for prompt in prompts] == [{"temperature": 0.5}, {}, {"max_tokens": 20}]
    held_out = source(tokenizer, tmp_path / "rows.jsonl", cells, "data.eval").all()
    assert [prompt.sampling for prompt in held_out] == [{}, {}, {}]  # evaluation has its own parameters


def test_rows_have_no_parameter_that_vllm_refuses_beside_drafts(tokenizer, tmp_path):  # noqa: F811
    drafts = ["rollout.extra_args=[--speculative-config.method, ngram]"]
    for name, value in {"min_p": 0.1, "logit_bias": {"65": 1.0}}.items():
        assert source(tokenizer, tmp_path / "rows.jsonl", [{name: value}]).all()
        with pytest.raises(ValueError, match=f"row 0: .*speculative decoding refuses {name}; remove it from the rows"):
            source(tokenizer, tmp_path / "rows.jsonl", [{name: value}], overrides=drafts).all()
    assert source(tokenizer, tmp_path / "rows.jsonl", [{"min_p": 0, "top_p": 0.5}], overrides=drafts).all()


@for_each(
    ("cell", "problem"),
    [
        ({"temprature": 1.0}, "has `temprature`; did you mean `temperature`"),
        ("hot", "must be a mapping of sampling parameters (got 'hot')"),
        ({"temperature": 0}, "temperature: Input should be greater than or equal to 0.01 (got 0)"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2 (got 3)"),
        ({"temperature": True}, "temperature: Value error, must be a number, not true or false (got True)"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than 0 (got 0)"),
        ({"max_tokens": 21}, "max_tokens 21 is above rollout.max_completion_length 20; lower it"),
        ({"top_k": -5}, "top_k: Input should be greater than or equal to 0 (got -5)"),
        ({"top_p": 0}, "top_p: Input should be greater than 0 (got 0)"),
        ({"min_tokens": 5}, "a row cannot have its own `min_tokens`: the trainer does not repeat it"),
        ({"thinking_token_budget": 5}, "a row cannot have its own `thinking_token_budget`: it is max_thinking_tokens"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens needs a budget of the run; set rollout.max_thinking_tokens"),
        ({"n": 5}, "a row cannot have its own `n`: set rollout.num_generations"),
        ({"stop": ["x~"]}, "stop has the special token ~; name it in rollout.stop, for all rows"),
        ({"stop": [""]}, "stop: Value error, must not be empty"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0 (got -1)"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "must name one constraint, but has regex, choice"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs: xgrammar cannot compile the regex"),
        ({"logit_bias": {"ab": 1.0}}, "logit_bias: the text 'ab' is 2 tokens, [65, 66]; name one token, or its id"),
        ({"logit_bias": {"a": 1.0, "65": 2.0}}, "logit_bias: names token 65 twice, by its id and by a text"),
        ({"logit_bias": {"a": 101}}, "logit_bias: Input should be less than or equal to 100 (got 101)"),
        ({"allowed_token_ids": [3, 3]}, "allowed_token_ids: Value error, must name each token once"),
    ],
)
def test_parameters_that_no_request_can_have_are_refused(cell, problem, tokenizer, tmp_path):  # noqa: F811
    with pytest.raises(ValueError) as error:
        source(tokenizer, tmp_path / "rows.jsonl", [None, cell])
    assert "data.train: row 1: column `own` (data.sampling_column)" in str(error.value)
    assert problem in str(error.value)


def taught(tokenizer, path, rows, *teachers, key="data.train", overrides=()):  # noqa: F811
    """What teachers read of each row, as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = [f"algorithm.teacher={json.dumps(list(teachers))}", f"data.train.source={path}", *overrides]
    config = validated(
        dict(model={"path": "m"}, rewards={"functions": []}, data={"train": {"source": "a.jsonl"}}), listed, "test"
    )
    reader = RowReader(config, tokenizer)
    prompts = PromptSource(config.data.train, config.data, tokenizer, 100, 0, key, row_reader=reader).all()
    read = [prompt.teachers for prompt in prompts]
    return [one and {name: ids and tokenizer.decode(ids) for name, ids in one.items()} for one in read]


def test_a_row_chooses_its_teachers_and_their_prompts(tokenizer, tmp_path):  # noqa: F811
    rows = [{"prompt": "1+1", "answer": "2", "kind": 1}, {"prompt": "1+2", "answer": "3 {kind}", "kind": 2}]
    told = {"path": "policy", "prompt": "{prompt} is {answer}"}
    some, other = {"path": "a/b", "where": {"kind": ["1"]}}, {"path": "c/b", "where": {"kind": 2, "task": "sums"}}
    rows = [row | {"task": "sums"} for row in rows]
    read = taught(tokenizer, tmp_path / "rows.jsonl", rows, told, some, other, {"path": "policy", "prompt": "{answer}"})
    texts = ["1+1 is 2", "2", "1+2 is 3 {kind}", "3 {kind}"]
    one, two, three, four = (tokenizer.decode(tokenizer.render(text)) for text in texts)
    assert read == [
        {"policy": one, "b": (), "b_2": None, "policy_2": two},
        {"policy": three, "b": None, "b_2": (), "policy_2": four},
    ]
    assert taught(tokenizer, tmp_path / "rows.jsonl", rows, told, key="data.eval") == [None, None]
    assert taught(tokenizer, tmp_path / "rows.jsonl", rows, {"path": "a/b"}) == [None, None]
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]
    asked = _asked("{prompt}: {answer}", {"answer": 2}, said, "")
    assert asked == [said[0], {"role": "user", "content": "1+1: 2"}] and said[1]["content"] == "1+1"


@for_each(
    ("row", "teacher", "problem"),
    [
        (
            {},
            {"where": {"kind": 1}},
            "row 0: has no value in column `kind`, which algorithm.teacher.0.where reads; fill",
        ),
        ({"kind": None}, {"prompt": "{kind}"}, "has no value in column `kind`, which algorithm.teacher.0.prompt reads"),
        ({"kind": 3}, {"prompt": "{kind}"}, "row 0: column `kind` must be a string or chat messages (got 3)"),
        (
            {"kind": 3},
            {"where": {"kind": 1}},
            "no teacher teaches the row, and there are no rewards; widen a teacher's",
        ),
        (
            {"kind": "x" * 999},
            {"prompt": "{kind}"},
            "algorithm.teacher.0.prompt has 1000 tokens, rollout.max_prompt_leng",
        ),
    ],
)
def test_a_row_that_teachers_cannot_teach_is_named(row, teacher, problem, tokenizer, tmp_path):  # noqa: F811
    with pytest.raises(ValueError) as error:
        taught(tokenizer, tmp_path / "rows.jsonl", [{"prompt": "Hi"} | row], {"path": "a/b"} | teacher)
    assert "data.train: row 0: " in str(error.value) and problem in str(error.value)


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
    assert own_sampling(SamplingParams(1.0, 3), request.prompt.sampling).max_tokens == 3
    assert own_sampling(sampling, {}) is sampling
    limited = replace(sampling, thinking=Thinking(4, "<think>", "</think>", (5,)))
    assert own_sampling(limited, {"max_thinking_tokens": 2}).thinking == replace(limited.thinking, max_tokens=2)
    assert own_sampling(limited, {"top_k": 2}).thinking == limited.thinking


RESUMED = ("rollout.max_staleness=1", "rollout.in_flight=resume", "rollout.placement=dedicated")
CORRECTED = ("algorithm.importance_correction=token_truncate", "algorithm.importance_correction_max=2")


def test_what_begins_again_with_each_request_is_refused_where_responses_are_requested_again(tokenizer, tmp_path):  # noqa: F811
    cell = {"structured_outputs": {"choice": ["a"]}}
    source(tokenizer, tmp_path / "rows.jsonl", [cell])
    with pytest.raises(ValueError, match="structured_outputs starts again with each request, but an interrupted"):
        source(tokenizer, tmp_path / "rows.jsonl", [cell], overrides=(*RESUMED, *CORRECTED))
    with pytest.raises(ValueError, match="structured_outputs starts again with each request, and a thought's end"):
        source(tokenizer, tmp_path / "rows.jsonl", [cell], overrides=["rollout.max_thinking_tokens=9"])


EVERYTHING = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.01,
    "stop": "END",
    "seed": 7,
    "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2}}}},
    "repetition_penalty": 1.2,
    "logit_bias": {"a": 1.5, "3": -100},
    "allowed_token_ids": [94, 65, 66],
}
READ = EVERYTHING | {
    "stop": ["END"],
    "logit_bias": {"65": 1.5, "3": -100},
}
OTHERS = [
    {"max_tokens": 3, "structured_outputs": {"choice": ["x", "y"]}, "logit_bias": {"b": 2.0}},
    None,
    {"structured_outputs": {"json": {"properties": {"b": {"enum": ["1"]}}, "required": ["b"]}}},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_rows_of_different_shapes_are_read_from_files_that_fill_them_with_none(kind, tokenizer, tmp_path):  # noqa: F811
    import datasets

    cells = [EVERYTHING, *OTHERS]
    if kind == "parquet":
        table = datasets.Dataset.from_list([{"prompt": "Hi", "own": cell} for cell in cells])
        assert table[1]["own"]["structured_outputs"]["json"] is None  # Arrow has one schema for all rows
        table.to_parquet(tmp_path / "rows.parquet")
    path = tmp_path / f"rows.{kind if kind == 'parquet' else 'jsonl'}"
    if kind != "parquet":
        texts = [json.dumps(cell) if kind == "text" and cell else cell for cell in cells]
        path.write_text("".join(json.dumps({"prompt": "Hi", "own": cell}) + "\n" for cell in texts))
    config = run(f"data.train.source={path}")
    reader = RowReader(config, tokenizer)
    prompts = PromptSource(config.data.train, config.data, tokenizer, 100, 0, row_reader=reader).all()
    found = [prompt.sampling for prompt in prompts]
    assert found == [READ, OTHERS[0] | {"logit_bias": {"66": 2.0}}, {}, OTHERS[2]]
    assert json.dumps(found[0]) and of_row(sampling_row(prompts[0])) == json.loads(json.dumps(prompts[0].distribution))


def test_a_request_has_every_parameter_of_its_row():
    sampling = SamplingParams(1.0, 10, stop=("U",), repetition_penalty=1.5)
    own = own_sampling(sampling, READ)
    assert own.stop == ("U", "END") and own_sampling(own, READ) == own  # a turn of an agent gets them twice
    sent = sampling_params(own)
    expected = dict(temperature=0.5, stop=("U", "END"), repetition_penalty=1.2)
    expected |= dict(top_p=0.5, top_k=7, min_p=0.01)
    expected |= dict(logit_bias={65: 1.5, 3: -100})
    expected |= dict(allowed_token_ids=(94, 65, 66), detokenize=True)
    expected |= dict(structured_outputs={"json": json.dumps(READ["structured_outputs"]["json"])})
    assert {name: sent[name] for name in expected} == expected


def test_a_rows_seed_is_the_first_response_s():
    own = Prompt(3, (1,), "", sampling={"seed": 7})
    assert _seed_of_group(own, 4, 99) == 7 == _seed_of_group(own, 4, 1)  # in every epoch
    again = Prompt(3, (1,), "", sampling={"seed": 7}, occurrence=1)
    assert _seed_of_group(again, 4, 99) == 11  # the second time in a step has other seeds
    assert _seed_of_group(Prompt(3, (1,), ""), 4, 99) != _seed_of_group(Prompt(3, (1,), ""), 4, 1)


@pytest.mark.parametrize("share", [False, True], ids=["own prompts", "shared prompts"])
def test_packing_carries_parameters_only_if_a_row_has_them(share):
    def sample(**own):
        mask = torch.tensor([False, False, True, True])
        return TrainSample(torch.arange(4), mask, torch.zeros(4), 1.0, sampling=own)

    rules = PackingRules(100, share_prompts=share, align=4)
    assert build_micro_batch([sample(), sample()], rules).sampling == ()
    batch = build_micro_batch([sample(), sample(temperature=0.5), sample(logit_bias={"3": 1.0})], rules)
    own = [batch.sampling[sequence] for sequence in batch.sequence_index[batch.loss_mask].tolist()]
    assert own == [
        {},
        {},
        {"temperature": 0.5},
        {"temperature": 0.5},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": {"3": 1.0}},
    ]


def drawn(*own):
    prompts = [Prompt(i, (1,), "", sampling=sampling, position=i) for i, sampling in enumerate(own)]
    return [ScoredRollout(Rollout(p, [2], [-1.0], "stop", 0, ""), {"f": 1.0}, 1.0) for p in prompts]


def test_lengths_of_parameters_of_drawn_samples_join_those_of_earlier_ones():
    """Dynamic sampling: the first round has no row with parameters that change log-probs."""
    warm = {"temperature": 0.5}
    first, second = (
        StepSamples.of(drawn({}, {"max_tokens": 2, "stop": ["x"], "seed": 1})),
        StepSamples.of(drawn(warm, {})),
    )
    assert "sampling" not in first.facts.dtype.names
    words = -(-len(json.dumps(warm)) // 4)
    assert (first + second).facts["sampling"].tolist() == [0, 0, words, 0]
    assert (first + second).select(np.array([2, 0])).facts["sampling"].tolist() == [words, 0]
    assert [s.sampling for s in to_samples(drawn(warm, {}), torch.ones(1, 2))] == [warm, {}]


def test_groups_in_a_checkpoint_keep_the_parameters_that_they_were_sampled_with():
    (scored,) = drawn(READ)
    saved = json.loads(json.dumps(packed([scored.rollout])))
    (restored,) = unpacked(
        saved, Prompt(0, (1,), "", sampling={"temperature": 2.0}, position=0)
    )  # the file has changed
    assert restored.prompt.sampling == json.loads(json.dumps(READ))
    own = own_sampling(SamplingParams(1.0, 10), restored.prompt.sampling)
    assert own == own_sampling(SamplingParams(1.0, 10), READ)
    del saved["sampling"]  # of an older checkpoint
    assert unpacked(saved, Prompt(0, (1,), "", sampling={"temperature": 2.0}))[0].prompt.sampling == {
        "temperature": 2.0
    }
