"""The audit's checks of one sample: how it ended, its text, and what its rewards get."""

import re
from dataclasses import replace
from types import SimpleNamespace

import torch

from megagrpo.config import RunConfig
from megagrpo.data.tokens.tokenizer import load_tokenizer
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.for_each import for_each

STOP, EOS = "</a>", 2


def sample(tokenizer, text, shown, reason="stop", eos=False, foreign=0, **more):
    """A sample with a prompt of two tokens, whose first `foreign` response tokens are not the policy's."""
    from megagrpo.proof.audit.saved import Sample

    ids = [*tokenizer.encode(text, False), *[EOS] * eos]
    dialogue = {"messages": [], "turns": [], "ended": "done"} if foreign else None
    content = dict(response=shown, finish_reason=reason, dialogue=dialogue, prompt_id=0, prompt="", columns={}) | more
    written = torch.arange(2 + foreign, 2 + len(ids))
    return Sample(torch.tensor([1, 1, *ids]), 2, torch.zeros(2 + len(ids)), written, content | {"weight_version": 0})


@for_each(
    ("text", "shown", "options", "problem"),
    [
        ("9</a>", "9</a>", {}, ""),
        ("9</a>", "9", {}, "the text differs"),
        ("9</a>", "9", {"include": False}, ""),
        ("9", "9", {"eos": True}, ""),
        ("9", "9", {}, "is not an end token and completes no stop string"),
        ("9</a> So", "9</a>", {}, "has tokens after the stop string '</a>'"),
        ("9</a>", "9</a>", {"stop": []}, "is not an end token$"),
        ("</a>9</a>", "</a>9</a>", {"foreign": 4}, ""),  # a stop string in a message of others is none
        ("9", "9", {"reason": "length"}, "cut after"),
    ],
)
def test_a_response_may_end_with_a_stop_string(chat_folder, text, shown, options, problem):  # noqa: F811
    from megagrpo.proof.audit.audit_checks import _sample_problems

    tokenizer = load_tokenizer(chat_folder)
    stop, include = options.pop("stop", [STOP]), options.pop("include", True)
    rollout = {"stop": stop} | ({} if include else {"include_stop_str_in_output": False})
    values = {
        "model": {"path": "m"},
        "data": {"train": {"source": "a"}},
        "rewards": {"functions": [{"function": "format"}]},
    }
    step = SimpleNamespace(config=RunConfig.model_validate(values | {"rollout": rollout}))
    found = list(_sample_problems(sample(tokenizer, text, shown, **options), step, tokenizer))
    assert bool(found) == bool(problem) and all(re.search(problem, said) for said in found[:1]), found


def test_rewards_are_run_again_with_what_the_template_had_opened(chat_folder):  # noqa: F811
    from megagrpo.proof.audit.audit_checks import _rollout

    one = sample(load_tokenizer(chat_folder), "9", "9", opened="<think>")
    assert _rollout(one).prompt.opened == "<think>"
    # an older dump
    assert _rollout(replace(one, text={k: v for k, v in one.text.items() if k != "opened"})).prompt.opened == ""


def test_a_sample_that_no_optimizer_step_or_two_trained_on_is_found():
    from megagrpo.proof.audit.audit_checks import _slices

    algorithm = SimpleNamespace(steps_per_generation=2)
    for trained, passed in ((([0, 1], [2]), True), (([0], [2]), False), (([0, 1], [1, 2]), False)):
        updates = [SimpleNamespace(samples=samples) for samples in trained]
        step = SimpleNamespace(config=SimpleNamespace(algorithm=algorithm), samples=range(3), updates=updates)
        step.is_frozen = lambda sample: False
        check = _slices(step)
        assert (check.passed, check.place) == (passed, "" if passed else "sample 1")
