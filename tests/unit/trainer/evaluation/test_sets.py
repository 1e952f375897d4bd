"""pass@k, maj@k and the responses' answers, against counts by hand."""

import itertools
from dataclasses import replace
from fractions import Fraction
from statistics import fmean

import pytest

from megagrpo.config import RunConfig, evaluation_sets
from megagrpo.data.packing.sample_table import votes_of
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.prompts import prompt_reader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import tokenizer_of
from megagrpo.rewards.math.answers import READ_BY, extractor
from megagrpo.rewards.registry.target import BUILT_IN_REWARDS
from megagrpo.trainer.evaluation.sets import (
    HeldOut,
    evaluate,
    load_sets,
    majority_passes,
    metrics_of,
    pass_at_k,
    steps_to,
)
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout, Truncation
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.for_each import for_each


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_one_that_passes(n):
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [1] * passed + [0] * (n - passed)
        choices = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, passed, k) == pytest.approx(float(Fraction(sum(map(max, choices)), len(choices))))


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1)])
def test_pass_at_k_of_more_than_there_are_is_refused(n, passed, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {n} responses of which {passed} pass"):
        pass_at_k(n, passed, k)


def test_k_doubles_up_to_the_number_of_responses():
    assert [steps_to(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


@pytest.mark.parametrize(
    ("answers", "passed", "wins"),
    [
        (["4", "5", "4"], [True, False, True], True),
        (["5", "5", "4"], [False, False, True], False),
        (["4", "5"], [True, False], True),  # a tie: the first
        (["5", "4"], [False, True], False),
        ([None, None, "4"], [False, False, True], True),  # a missing answer does not vote
        ([None, None], [False, False], False),
    ],
)
def test_the_majority_decides(answers, passed, wins):
    assert majority_passes(answers, passed) is wins


@for_each(
    ("kind", "text", "answer"),
    [
        ("number", "12 apples, so 1,000.50", "1000.5"),
        ("number", "none", None),
        ("number", "it is 100", "100"),
        ("tag", "<answer>1</answer> no: <answer> a\n b </answer>", "a b"),
        ("tag", "42", None),
        ("boxed", r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"<answer>$\frac12$</answer> \boxed{3}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("text", "  yes\n no ", "yes no"),
        ("text", " ", None),
    ],
)
def test_answers_are_read_as_their_kind_says(kind, text, answer):
    assert extractor(kind, "f.py:mine")(text) == answer


def test_what_a_built_in_function_reads_is_known_and_what_others_read_is_not():
    assert READ_BY.keys() <= BUILT_IN_REWARDS.keys()
    assert extractor("auto", "exact_number")("so 7.0") == "7" and extractor("auto", "f.py:mine") is None
    assert extractor("auto", "format") is None


# ----------------------------------------------------------------------------------------------------------- whole sets


def held_out(n, answer="number", **more):
    settings = dict(
        name="sums",
        key="evaluation.sets.sums",
        prompts=[Prompt(i, (1,), "") for i in range(2)],
        columns=[],
        num_generations=n,
    )
    settings |= dict(
        sampling=SamplingParams(1.0, 8), function="exact_number", pass_reward=1.0, answer=extractor(answer, "")
    )
    return HeldOut(**settings | more)


def measured(of_set, responses):
    votes = votes_of(responses, of_set.num_generations, of_set.vote)
    return metrics_of(of_set, StepSamples.of(responses, votes=votes))


def scored(prompt, *pairs):
    """Responses of a prompt as (text, reward)."""
    rollouts = [Rollout(prompt, (2,) * len(text), (-1.0,) * len(text), "stop", 1, text) for text, _ in pairs]
    return [
        ScoredRollout(r, {"exact_number": reward}, reward or 0.0)
        for r, (_, reward) in zip(rollouts, pairs, strict=True)
    ]


def test_a_set_of_two_prompts_by_hand():
    one, two = held_out(3).prompts
    responses = scored(one, ("4", 1.0), ("5", 0.0), ("5", 0.0)) + scored(two, ("7", 1.0), ("7.0", 1.0), ("no", 0.0))
    found = measured(held_out(3), responses)
    assert found["pass@1"] == pytest.approx((1 / 3 + 2 / 3) / 2) and found["pass@3"] == 1
    assert found["pass@2"] == pytest.approx(fmean([1 - 1 / 3, 1]))
    assert found["maj@3"] == 0.5 and found["reward"] == 0.5 and found["rewards/exact_number/mean"] == 0.5
    assert found["completions/mean_length"] == pytest.approx((1 + 1 + 1 + 1 + 3 + 2) / 6)
    assert "maj@3" not in measured(held_out(3, answer="auto"), responses)
    assert measured(replace(held_out(3), pass_reward=0.0), responses)["pass@1"] == 1


def test_a_majority_reads_what_the_template_opened_as_part_of_the_response():
    one = replace(held_out(3).prompts[0], opened="<think>")
    seen = []
    measured(replace(held_out(2), answer=lambda text: seen.append(text)), scored(one, ("4", 1.0), ("5", 0.0)))
    assert seen == ["<think>4", "<think>5"]


def test_sets_are_sampled_with_the_stop_strings_and_the_template_of_the_run(chat_folder, tmp_path):  # noqa: F811
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 3?", "answer": "3"}\n')
    source, template = {"source": str(rows)}, "{{ messages[0].content }}{{ opening }}"
    config = RunConfig.model_validate(
        {
            "model": {"path": str(chat_folder)},
            "data": {
                "train": source,
                "eval": source,
                "chat_template": template,
                "chat_template_kwargs": {"opening": "<think>"},
            },
            "rewards": {"functions": [{"function": "exact_number"}]},
            "rollout": {"stop": ["</answer>"], "include_stop_str_in_output": False, "top_k": 9},
            "evaluation": {"steps": 1, "top_p": 0.5, "temperature": 0.7},
        }
    )
    tokenizer = tokenizer_of(config, chat_folder)
    (found,) = load_sets(config.each_task[0], sampling_of(config.rollout, tokenizer), prompt_reader(config, tokenizer))
    limit, truncation = config.rollout.max_completion_length, Truncation(top_p=0.5)
    assert found.sampling == SamplingParams(0.7, limit, (0, 2, 3), truncation, ("</answer>",), include_stop=False)
    assert found.prompts[0].opened == "<think>"


def test_shares_of_responses_that_a_stop_string_or_a_budget_ended_are_metrics_of_runs_that_have_them():
    one, two = held_out(2).prompts
    responses = scored(one, ("4", 1.0), ("5", 0.0)) + scored(two, ("7", 1.0), ("no", 0.0))
    assert "completions/stop_string_ratio" not in measured(held_out(2), responses)
    stops = ["</answer>", "", "", ""]
    with_stops = [
        replace(s, rollout=replace(s.rollout, stop_string=stop)) for s, stop in zip(responses, stops, strict=True)
    ]
    assert measured(held_out(2), with_stops)["completions/stop_string_ratio"] == 0.25
    ratio, spans = "completions/forced_end_of_thinking_ratio", [((0, 1),), (), (), ()]
    forced = [replace(s, rollout=replace(s.rollout, forced=f)) for s, f in zip(responses, spans, strict=True)]
    shares = measured(held_out(2), forced)
    assert ratio not in measured(held_out(2), responses) and shares[ratio] == 0.25
    written = [len(s.rollout.response_ids) for s in responses]
    assert shares["completions/mean_length"] == (sum(written) - 1) / 4


def test_prompts_that_the_function_cannot_score_are_left_out_and_single_responses_that_it_cannot_do_not_pass():
    one, two = held_out(2).prompts
    responses = scored(one, ("4", None), ("5", None)) + scored(two, ("7", 1.0), ("7", None))
    found = measured(held_out(2), responses)
    assert (found["pass@1"], found["pass@2"], found["maj@2"]) == (0.5, 1, 1)
    assert "pass@1" not in measured(held_out(2), scored(one, ("4", None), ("5", None)))


def test_one_response_per_prompt_gives_pass_at_1_alone():
    one, two = held_out(1).prompts
    found = measured(held_out(1), scored(one, ("4", 1.0)) + scored(two, ("7", 0.0)))
    assert {name: value for name, value in found.items() if "@" in name} == {"pass@1": 0.5}


def test_every_set_is_asked_with_its_own_sampling_and_a_seed_that_stays():
    asked = []

    def collect(prompts, n, sampling, seed, vote):
        asked.append((len(prompts), n, sampling.temperature, seed))
        responses = [s for prompt in prompts for s in scored(prompt, *[("4", 1.0)] * n)]
        samples = StepSamples.of(responses, votes=votes_of(responses, n, vote))
        return samples, {"rewards/exact_number/timeouts": 0.0}

    seen = []
    sets = [held_out(1, name=""), held_out(2, sampling=SamplingParams(0.5, 8))]
    metrics = evaluate(sets, collect, 42, lambda of, responses: seen.append((of.name, len(responses))))
    evaluate(sets, collect, 42)
    assert (
        [(p, n, t) for p, n, t, _ in asked[:2]] == [(2, 1, 1.0), (2, 2, 0.5)]
        and asked[:2] == asked[2:]
        and asked[0][3] != asked[1][3]
    )
    assert seen == [("", 2), ("sums", 4)]
    assert metrics["pass@1"] == metrics["sums/pass@2"] == 1 and metrics["sums/rewards/exact_number/timeouts"] == 0


def test_what_a_set_leaves_empty_comes_from_the_sections_above_it():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "rollout": {"max_prompt_length": 100, "max_completion_length": 50},
            "data": {
                "train": {"source": "a"},
                "eval": {"source": "b", "size": 3},
                "prompt_column": "question",
                "columns": {"x": "y"},
            },
            "rewards": {"functions": [{"function": "exact_number"}]},
            "evaluation": {
                "temperature": 0.7,
                "top_p": 0.9,
                "num_generations": 2,
                "sets": {"hard": dict(source="c", top_p=1.0, max_completion_length=80, columns={}, num_generations=4)},
            },
        }
    )
    plain, hard = evaluation_sets(config).values()
    assert (plain.source, plain.size, plain.temperature, plain.top_p, plain.max_completion_length) == (
        "b",
        3,
        0.7,
        0.9,
        50,
    )
    assert (hard.source, hard.temperature, hard.top_p, hard.num_generations, hard.prompt_column) == (
        "c",
        0.7,
        1.0,
        4,
        "question",
    )
    assert (plain.columns, hard.columns, plain.num_generations) == ({"x": "y"}, {}, 2)
    assert config.longest_sequence == 180 and config.max_model_len == 150
