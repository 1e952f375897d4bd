"""Sampling parameters that change the distribution of single requests: trainer, engine and audit use the same one."""

import json
import re
import shutil

import pytest
from ranks import run_ranks

from megagrpo.__main__ import main
from megagrpo.policy.lm_head.logit_processors import LogitProcessors
from megagrpo.proof.audit.saved import load_step
from tests.e2e import world

COMPARED = ["algorithm.beta=0.1", "algorithm.num_iterations=2", "debug.dump_steps=[2]"]


def trained(output, *options):
    run = world.train(output, *options, *COMPARED)
    assert run.code == 0, run.err
    return run


def agrees(run):
    """Trainer and engine agree in every step, and the audit with the dumped one."""
    for line in run.metrics:
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    code, said = world.audit(run.folder, "--step", 2, "--json")
    assert code == 0 and json.loads(said)["passed"], said


def rows_with_sampling(path):
    """The world's rows: two of three have parameters of their own."""
    rows = [json.loads(line) for line in (world.folder() / "train.jsonl").read_text().splitlines()]
    own = [{}, {"sampling": {"temperature": 0.6, "max_tokens": 5}}, {"sampling": json.dumps({"temperature": 1.7})}]
    path.write_text("".join(json.dumps(row | own[i % 3]) + "\n" for i, row in enumerate(rows)))
    return [f"data.train.source={path}", "data.sampling_column=sampling"]


@pytest.fixture(scope="module")
def of_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return trained(folder, *rows_with_sampling(folder / "train.jsonl"))


def test_rows_have_their_own_temperature_and_limit(of_rows):
    agrees(of_rows)
    kinds = set()
    for sample in load_step(of_rows.folder, 2).samples:
        own = sample.sampling
        assert own == [{}, {"temperature": 0.6, "max_tokens": 5}, {"temperature": 1.7}][sample.text["prompt_id"] % 3]
        if sample.text["finish_reason"] == "length":
            kinds.add((sample.places.numel(), own.get("temperature")))
    assert (5, 0.6) in kinds and kinds <= {(12, None), (5, 0.6), (12, 1.7)}


CHANGES = {
    "bias": ["rollout.logit_bias={65: 3.0, 10: -100}"],
    "repetition": ["rollout.repetition_penalty=1.4", "rollout.temperature=0.8"],
    "regex": ["rollout.structured_outputs={regex: '[0-9]{1,3}(, [a-f]{2,4})+'}", "rollout.logit_bias.44=1.5"],
    "choice": ["rollout.structured_outputs={choice: [yep, no, 'may \"be']}", "rollout.repetition_penalty=1.2"],
    "json": ["rollout.structured_outputs={json: {type: object, properties: {a: {type: integer}}, required: [a]}}"],
    "counts": ["rollout.frequency_penalty=0.7", "rollout.presence_penalty=-0.5", "rollout.top_p=0.8"],
}


EVERYTHING = [
    "rollout.structured_outputs={regex: '([a-h]{1,3}[.] )*[a-h]'}",
    "rollout.logit_bias={46: 2.0, 97: -1.5}",
    "rollout.repetition_penalty=1.3",
    "rollout.frequency_penalty=0.3",
    "rollout.presence_penalty=0.2",
]


@pytest.mark.parametrize("name", CHANGES)
def test_changed_logits_are_the_same_in_trainer_engine_and_audit(name, tmp_path):
    agrees(trained(tmp_path, *CHANGES[name]))


def test_without_the_replay_trainer_and_engine_differ(tmp_path):
    def ignore():
        LogitProcessors.apply = lambda *args: None

    run = world.train(tmp_path, *CHANGES["repetition"], "run.max_steps=1", prepare=ignore)
    assert run.code == 0 and run.metrics[0]["token_mult_prob_error"] > 1.1, run.err


AGAIN = """
def again(messages, turn, **columns):
    return [*messages, {"role": "user", "content": "?"}], turn == 3, 0.0
"""


def test_each_turn_has_its_own_constraint_limit_and_counts(tmp_path):
    (tmp_path / "mine.py").write_text(AGAIN)
    words = [f"multi_turn.scheduler={tmp_path}/mine.py:again", "multi_turn.workers=1", "rollout.max_prompt_length=36"]
    rows = rows_with_sampling(tmp_path / "train.jsonl")
    run = trained(
        tmp_path,
        *rows,
        *words,
        "multi_turn.max_response_length=27",
        "multi_turn.completion_length_limit_scope=per_round",
        *EVERYTHING,
    )
    agrees(run)
    written = [[m["content"] for m in row["dialogue"]["messages"][::2]] for row in run.completions]
    assert max(map(len, written)) == 3
    assert all(re.fullmatch("([a-h]{1,3}[.] )*[a-h]", text) for texts in written for text in texts[:-1])


@pytest.mark.parametrize("layout", ["tp", *(pytest.param(name, marks=pytest.mark.full) for name in ("cp", "pp", "dp"))])
def test_every_layout_repeats_the_changes(layout, tmp_path):
    rows, words = (
        rows_with_sampling(tmp_path / "train.jsonl"),
        COMPARED if layout == "dp" else [f"parallel.{layout}=2", *COMPARED],
    )
    codes = run_ranks(main, 2, ["train", *world.arguments(tmp_path, *rows, *words, *EVERYTHING)])
    run = world.Run(max(codes), "", "", tmp_path / "run")
    assert run.code == 0
    agrees(run)


@pytest.mark.full
def test_a_checkpoints_own_penalty_does_not_change_what_is_sampled(tmp_path):
    """Qwen2.5's generation_config.json has a repetition penalty, which vLLM's chat endpoint would take."""
    shutil.copytree(world.folder() / "model", tmp_path / "model")
    own = {"repetition_penalty": 1.5, "temperature": 0.3, "eos_token_id": 257}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(own))
    run = world.train(tmp_path, f"model.path={tmp_path}/model", "run.max_steps=1", launched=True)
    assert run.code == 0 and run.metrics[0]["token_mult_prob_error"] == pytest.approx(1, abs=1e-4), run.err
