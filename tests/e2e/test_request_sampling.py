"""Sampling parameters that change the distribution of single requests: trainer, engine and audit use the same one."""

import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.__main__ import main
from megagrpo.data.tokens.request_trial import shared_trial
from megagrpo.policy.lm_head.logit_processors import LogitProcessors
from megagrpo.proof.audit.saved import load_step
from megagrpo.records.checkpoints.run_files import checkpoints
from megagrpo.types import Truncation
from tests.e2e import world
from tests.naive_truncation import truncated_log_softmax


@pytest.fixture(scope="module", autouse=True)
def one_trial():
    """One process, which imports vLLM once, tries the constraints of all runs: their ranks are forks of this
    process."""
    trial, lock = shared_trial(), multiprocessing.Lock()
    assert trial.refusal({"regex": "a"}) is None
    process, ask = trial._process, trial._asked

    def ask_alone(*request):
        with lock:
            return ask(*request)

    trial._started, trial._asked, trial.close = lambda: process, ask_alone, lambda: None
    yield
    assert process.poll() is None
    del trial._started, trial._asked, trial.close
    trial.close()


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


CHOICES, FEW = ["yep", "no", "nope"], "cdefgE"
HEAT = [{}, {"temperature": 0.6, "max_tokens": 5}, {"temperature": 1.7}]
FORMS = [
    {"structured_outputs": {"choice": CHOICES}, "repetition_penalty": 1.4},
    {"structured_outputs": {"regex": "[ab]{2,3}c?"}, "temperature": 0.8, "seed": 5},
]
KINDS = [
    *(*HEAT, *FORMS),
    {"logit_bias": {"a": 6, "b": 6, "c": 5}},
    {"allowed_token_ids": FEW, "stop": ["E", "dd"]},
    {"logit_bias": {"65": 2.0}, "top_p": 0.8},
    {"top_k": 6, "temperature": 1.2},
    {"top_p": 0.7, "min_p": 0.02},
]
IN_ORDER = ["data.shuffle=false", f"rollout.prompts_per_step={len(KINDS)}"]  # each step has a row of every kind


def token_ids(text):
    return AutoTokenizer.from_pretrained(world.folder() / "model").encode(text, add_special_tokens=False)


def rows_with_sampling(path, kinds=KINDS):
    """The world's rows with parameters of these kinds in turn, every other time as JSON text."""
    rows = [json.loads(line) for line in (world.folder() / "train.jsonl").read_text().splitlines()]
    lines = []
    for i, row in enumerate(rows):
        own = kinds[i % len(kinds)]
        if own.get("allowed_token_ids") == FEW:
            own = own | {"allowed_token_ids": token_ids(FEW)}
        lines.append(row | ({"sampling": json.dumps(own) if i // len(kinds) % 2 else own} if own else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"data.train.source={path}", "data.sampling_column=sampling"]


def follows_its_row(row, own):
    """Whether a response is one that its row allows; an oracle that knows texts only."""
    text, ended = row["completion"], row["finish_reason"] == "stop"
    pattern = own.get("structured_outputs", {}).get("regex")
    if pattern and ended:
        assert re.fullmatch(pattern, text), text
    if "choice" in own.get("structured_outputs", {}):
        assert text in CHOICES, text
    if "stop" in own:
        assert set(text) <= set(FEW) and ended == text.endswith(("E", "dd")), text
        assert not re.search("E.|dd.", text) and (row["stop_string"] in ("E", "dd")) == ended
    if "max_tokens" in own:
        assert row["num_tokens"] <= own["max_tokens"]


@pytest.fixture(scope="module")
def of_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return trained(folder, *rows_with_sampling(folder / "train.jsonl"), *IN_ORDER)


def test_rows_have_their_own_parameters(of_rows):
    agrees(of_rows)
    assert len(of_rows.completions) == 2 * len(KINDS) * 4
    for row in of_rows.completions:
        follows_its_row(row, KINDS[row["prompt_id"] % len(KINDS)])
    samples = load_step(of_rows.folder, 2).samples
    cut = {(s.places.numel(), s.sampling.get("temperature")) for s in samples if s.text["finish_reason"] == "length"}
    assert (5, 0.6) in cut and {length for length, _ in cut} <= {12, 5}


def next_letters(before, own):
    """The letters that may follow `before`, and "" for the end: from all words of the constraint's language, or from the
    texts of the row. None: all."""
    constraint = own.get("structured_outputs", {})
    words = constraint.get("choice", [])
    if pattern := constraint.get("regex"):
        every = ("".join(word) for n in range(5) for word in itertools.product("abc", repeat=n))
        words = [word for word in every if re.fullmatch(pattern, word)]
    return {word[len(before) : len(before) + 1] for word in words if word.startswith(before)} if words else None


@torch.no_grad()
def test_log_probs_are_a_softmax_over_what_brute_force_allows(of_rows):
    """Without a grammar's library, packing, or the audit: transformers' model, and letters of texts."""
    step = load_step(of_rows.folder, 2)
    model = AutoModelForCausalLM.from_pretrained(step.updates[0].weights, dtype=torch.float64).eval()
    ids = {letter: token_ids(letter)[0] for letter in "abcdefgEynopA"}
    (end,) = token_ids("<|end|>")
    checked = 0
    for sample in step.samples:
        own = sample.sampling
        logits = model(sample.token_ids[None]).logits[0]
        prompt, tokens = sample.token_ids[: sample.prompt_length].tolist(), sample.token_ids.tolist()
        for place in sample.places.tolist():
            row, written = logits[place - 1].clone(), tokens[sample.prompt_length : place]
            excluded = set()
            letters = {token: letter for letter, token in ids.items()}
            if "structured_outputs" in own:
                allowed = next_letters("".join(letters[token] for token in written), own)
                excluded = set(range(row.numel())) - {ids[letter] if letter else end for letter in allowed}
            if "allowed_token_ids" in own:
                excluded = set(range(row.numel())) - {ids[letter] for letter in FEW}
            row[sorted(excluded)] = -torch.inf
            for token, added in own.get("logit_bias", {}).items():
                row[int(token)] += added
            for token in range(row.numel()):
                if token in prompt + written and (penalty := own.get("repetition_penalty")):
                    row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
            row, rules = row / own.get("temperature", 1), {k: own[k] for k in ("top_p", "top_k", "min_p") if k in own}
            logprobs = row.log_softmax(-1)
            if rules:
                label = torch.tensor([tokens[place]])
                logprobs = truncated_log_softmax(row[None], label, Truncation(**rules))[0]
            assert logprobs[tokens[place]].item() == pytest.approx(sample.rollout_logprobs[place].item(), abs=2e-4)
            checked += 1
    assert checked > 100


CHANGES = {
    "bias": ["rollout.logit_bias={65: 3.0, 10: -100, a: 1.5}"],
    "repetition": ["rollout.repetition_penalty=1.4", "rollout.temperature=0.8"],
    "regex": ["rollout.structured_outputs={regex: '[0-9]{1,3}(, [a-f]{2,4})+'}", "rollout.logit_bias.44=1.5"],
    "choice": ["rollout.structured_outputs={choice: [yep, no, 'may \"be']}", "rollout.repetition_penalty=1.2"],
    "json": ["rollout.structured_outputs={json: {type: object, properties: {a: {type: integer}}, required: [a]}}"],
}


EVERYTHING = [
    "rollout.structured_outputs={regex: '([a-h]{1,3}[.] )*[a-h]'}",
    "rollout.logit_bias={46: 2.0, 97: -1.5, b: 1.0}",
    "rollout.repetition_penalty=1.3",
]


@pytest.mark.full  # other tests of this file have each kind beside others
@pytest.mark.parametrize("name", CHANGES)
def test_changed_logits_are_the_same_in_trainer_engine_and_audit(name, tmp_path):
    agrees(trained(tmp_path, *CHANGES[name]))


@pytest.mark.full
def test_without_the_replay_trainer_and_engine_differ(tmp_path):
    def ignore():
        LogitProcessors.apply = lambda *args: None

    run = world.train(tmp_path, *CHANGES["repetition"], "run.max_steps=1", prepare=ignore)
    assert run.code == 0 and run.metrics[0]["token_mult_prob_error"] > 1.1, run.err


AHEAD = ["rollout.max_staleness=1", "algorithm.importance_correction=token_truncate", "train.learning_rate=1e-30"]
# vLLM counts the tokens of an interrupted response from 0 again.
ALSO_RESUMED = [*HEAT, *KINDS[-2:], KINDS[6], {"logit_bias": {"a": 3}, "repetition_penalty": 1.2, "seed": 3}]


@pytest.mark.parametrize("in_flight", ["keep", pytest.param("resume", marks=pytest.mark.full)])
def test_parameters_of_rows_hold_ahead_of_training_and_through_syncs(in_flight, tmp_path):
    kinds = KINDS if in_flight == "keep" else ALSO_RESUMED
    rows = rows_with_sampling(tmp_path / "train.jsonl", kinds)
    # generation outlasts the training of a step
    one_by_one = ["rollout.max_completion_length=40", "rollout.max_num_seqs=1", "run.max_steps=6"]
    run = trained(tmp_path, *rows, *AHEAD, *one_by_one, *IN_ORDER[:1], f"rollout.in_flight={in_flight}")
    agrees(run)
    for row in run.completions:
        follows_its_row(row, kinds[row["prompt_id"] % len(kinds)])
    assert max(line["staleness/max"] for line in run.metrics) == 1
    assert any("later_versions" in row for row in run.completions)


def test_groups_ahead_keep_their_parameters_when_a_run_is_killed(tmp_path):
    words = [*rows_with_sampling(tmp_path / "train.jsonl"), *AHEAD, *IN_ORDER, "run.save_steps=1"]
    slow = ["rewards.functions.0.function=" + f"{tmp_path}/mine.py:slow", "data.shuffle=false"]
    (tmp_path / "mine.py").write_text(
        "import time\n\ndef slow(completions, **_):\n    time.sleep(0.2)\n    return [float(len(c)) for c in completions]\n"
    )

    def ahead():
        found = checkpoints(tmp_path / "run" / "checkpoints")
        return found and list(found[-1].glob("*ahead*"))

    with world.running(tmp_path, "run.max_steps=1000", *words, *slow) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2 and ahead(), "second step, with groups ahead")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    groups = [json.loads(line) for path in ahead() for line in path.read_text().splitlines()]
    before = {group["place"]: group["sampling"] for group in groups}
    assert any("structured_outputs" in own for own in before.values())
    saved = int(checkpoints(tmp_path / "run" / "checkpoints")[-1].name.removeprefix("step_"))
    last = [f"run.max_steps={saved + 2}", f"debug.dump_steps=[{saved + 1}]", "--resume"]
    run = world.train(tmp_path, *words, *slow, *last)
    assert run.code == 0, run.err
    assert all(line["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) for line in run.metrics)
    step = saved + 1
    dumped = load_step(run.folder, step).samples
    assert any(sample.sampling in before.values() for sample in dumped if sample.sampling)
    code, said = world.audit(run.folder, "--step", step, "--json")
    assert code == 0 and json.loads(said)["passed"], said


AGAIN = """
def again(messages, turn, **columns):
    return [*messages, {"role": "user", "content": "?"}], turn == 3, 0.0
"""


def test_each_turn_has_its_own_constraint_limit_and_counts(tmp_path):
    (tmp_path / "mine.py").write_text(AGAIN)
    words = [f"multi_turn.scheduler={tmp_path}/mine.py:again", "multi_turn.workers=1", "rollout.max_prompt_length=36"]
    rows, kinds = rows_with_sampling(tmp_path / "train.jsonl", [*HEAT, *FORMS]), [*HEAT, *FORMS]
    run = trained(tmp_path, *rows, *words, "multi_turn.max_response_length=27", *EVERYTHING)
    agrees(run)
    longest = 0
    for row in run.completions:
        texts = [message["content"] for message in row["dialogue"]["messages"][::2]]
        own = kinds[row["prompt_id"] % len(kinds)].get("structured_outputs", {"regex": "([a-h]{1,3}[.] )*[a-h]"})
        pattern = own.get("regex") or "|".join(own["choice"])
        assert all(re.fullmatch(pattern, text) for text in texts[:-1])
        longest = max(longest, len(texts))
    assert longest == 3


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "cp", "pp", "dp"])
def test_every_layout_repeats_the_changes(layout, tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds = [*HEAT, *FORMS, KINDS[5] | {"structured_outputs": {}}, KINDS[7], {"structured_outputs": {"json": schema}}]
    rows = [*rows_with_sampling(tmp_path / "train.jsonl", kinds), "data.shuffle=false"]
    words = COMPARED if layout == "dp" else [f"parallel.{layout}=2", *COMPARED]
    codes = run_ranks(main, 2, ["train", *world.arguments(tmp_path, *rows, *words, *EVERYTHING)])
    run = world.Run(max(codes), "", "", tmp_path / "run")
    assert run.code == 0
    agrees(run)
    assert {row["prompt_id"] for row in run.completions} == set(range(len(kinds)))
    assert all(re.match(r'\{\s*("a"|"?$|$)', row["completion"]) for row in run.completions if row["prompt_id"] == 7)


@pytest.mark.full
def test_a_checkpoints_own_penalty_does_not_change_what_is_sampled(tmp_path):
    """Qwen2.5's generation_config.json has a repetition penalty and more, which vLLM's chat endpoint would take."""
    shutil.copytree(world.folder() / "model", tmp_path / "model")
    own = {"repetition_penalty": 1.5, "temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "eos_token_id": 257}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(own))
    run = world.train(tmp_path, f"model.path={tmp_path}/model", "run.max_steps=1", launched=True)
    assert run.code == 0 and run.metrics[0]["token_mult_prob_error"] == pytest.approx(1, abs=1e-4), run.err


BUDGETS = [
    {},
    {"max_thinking_tokens": 3, "temperature": 0.7},
    {"max_tokens": 9},
    {"stop": list("bcdfghjklmnpqrstvwxyz"), "seed": 4},
    {"allowed_token_ids": FEW, "stop": ["E"], "max_thinking_tokens": 2},  # the forced tokens are not allowed
]
THINKS = ["rollout.max_thinking_tokens=6", "rollout.max_completion_length=24", "rollout.thinking_end=.</think>!"]


def opens_thoughts(path):
    """Options for a template whose prompts end with an open thought."""
    path.write_text(world.TEMPLATE.replace("{{ opening }}", "<think>"))
    return [f"data.chat_template={path}", *THINKS]


def forced_by(ids, own, end=".</think>!"):
    """Where tokens of a response are forced; an oracle that knows the budget only. A random model never closes a thought."""
    budget, size = own.get("max_thinking_tokens", 6), len(end)
    fits = budget + size < own.get("max_tokens", 24)
    return range(budget, budget + size) if fits and len(ids) > budget else range(0)


def test_forced_ends_of_thoughts_are_in_the_context_and_not_in_the_loss(tmp_path):
    rows = rows_with_sampling(tmp_path / "train.jsonl", BUDGETS)
    words = [*rows, *opens_thoughts(tmp_path / "opens.jinja"), "data.shuffle=false", "rollout.top_k=40", *COMPARED]
    words += ["rollout.prompts_per_step=10", "rollout.repetition_penalty=1.3", "rollout.temperature=0.9"]
    codes = run_ranks(main, 2, ["train", *world.arguments(tmp_path, *words)])  # two replicas exchange masks
    agrees(run := world.Run(max(codes), "", "", tmp_path / "run"))
    step, end, ratio = load_step(run.folder, 2), token_ids(".</think>!"), 0
    for sample in step.samples:
        ids = sample.token_ids[sample.prompt_length :].tolist()
        forced = forced_by(ids, BUDGETS[sample.text["prompt_id"] % len(BUDGETS)])
        assert [ids[place] for place in forced] == end[: len(forced)]
        own = [place for place in range(len(ids)) if place not in forced]
        assert (sample.places - sample.prompt_length).tolist() == own
        logprobs = sample.rollout_logprobs[sample.prompt_length :]
        assert (logprobs[own] < 0).all() and not logprobs[[*forced]].any()
        ratio += bool(forced) / len(step.samples)
    assert 0.5 < ratio < 0.8
    assert run.metrics[1]["completions/forced_end_of_thinking_ratio"] == pytest.approx(ratio)
    lengths = [sample.places.numel() for sample in step.samples]
    assert [update.denominator for update in step.updates] == [sum(lengths)] * 2
    assert run.metrics[1]["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    for row in run.completions:
        for start, stop in row["forced_tokens"]:
            assert stop - start == len(end) and row["completion"].count(".</think>!") == 1
            assert row["num_tokens"] + len(end) <= 24
    assert any(row.get("stop_string") and row["forced_tokens"] for row in run.completions)
