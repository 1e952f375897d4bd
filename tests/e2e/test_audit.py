"""Dumping a run's steps does not change the run. The audit agrees with the dump, and finds every number changed
afterwards."""

import json
import shutil

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from tests.e2e import world

OPTIONS = ["algorithm.beta=0.1", "algorithm.num_iterations=2", "algorithm.epsilon=0.05"]


def run(output, *options):
    functions = (
        f"rewards.functions=[{{function: {world.folder()}/rewards.py:low_bytes}},{{function: format,weight: 0.5}}]"
    )
    done = world.train(output, functions, *options)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A run of two steps with two optimizer steps each, both dumped."""
    return run(tmp_path_factory.mktemp("dumped"), *OPTIONS, "debug.dump_steps=[1,2]")


def verdict(folder, step):
    code, said = world.audit(folder, "--step", step, "--json")
    return code, json.loads(said)


def untimed(line):
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(world.MEASURED) and not name.endswith("/seconds")
    }


def test_a_dump_changes_nothing(dumped, tmp_path):
    plain = run(tmp_path, *OPTIONS)
    assert [row["completion"] for row in plain.completions] == [row["completion"] for row in dumped.completions]
    for one, other in zip(plain.metrics, dumped.metrics, strict=True):
        assert untimed(one) == untimed(other)
    weights = [world.plain_tensors(of.newest) for of in (plain, dumped)]
    assert weights[0].keys() == weights[1].keys() and all(
        torch.equal(weights[0][name], weights[1][name]) for name in weights[0]
    )
    assert not (plain.folder / "dumps").exists() and sorted(p.name for p in (dumped.folder / "dumps").iterdir()) == [
        "step_000001",
        "step_000002",
    ]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_audit_agrees_with_what_the_run_computed(dumped, step):
    code, said = world.audit(dumped.folder, "--step", step)
    assert code == 0 and said.splitlines()[-1] == "agrees: every quantity is within its tolerance", said
    code, found = verdict(dumped.folder, step)
    assert code == 0 and found["passed"] and found["first_difference"] is None
    checks = {check["quantity"]: check for check in found["checks"]}
    tokens = sum(row["num_tokens"] for row in dumped.completions if row["step"] == step)
    for name in ("policy log-probs", "old log-probs", "reference log-probs", "entropy", "masks"):
        for update in (1, 2):
            check = checks[f"{name}, optimizer step {update}"]
            assert check["count"] == tokens and check["difference"] < 1e-5
    # a step's metrics are means over its optimizer steps
    for quantity, metric in (("grad_norm", "grad_norm"), ("mean kl", "kl")):
        mean = sum(checks[f"{quantity}, optimizer step {update}"]["recomputed"] for update in (1, 2)) / 2
        assert mean == pytest.approx(dumped.metrics[step - 1][metric], rel=1e-5)
    assert checks["rewards"]["note"] == "run again: format; weighted sum of what is dumped: low_bytes"


# with the world's tokenizer of bytes, about half of the responses have one of them
STOPS = json.dumps([*"bdfhjlnprtvxz2468"])


def check_stops(done, stops):
    """Check that some responses ended with a letter of STOPS and some without, and that records and metrics say so."""
    ended = [row.get("stop_string") for row in done.completions]
    assert {*ended} == {None} if not stops else {"", None} <= {*ended, None} and len({*ended}) > 3
    for line in done.metrics if stops else ():
        rows = [row for row in done.completions if row["step"] == line["step"]]
        assert line["completions/stop_string_ratio"] == pytest.approx(
            sum(bool(row["stop_string"]) for row in rows) / len(rows)
        )
        for row in rows:
            assert not set("bdfhjlnprtvxz2468") & set(row["completion"]) and (
                row["finish_reason"] == "stop" or not row["stop_string"]
            )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["algorithm.loss_type=grpo", "algorithm.scale_rewards=batch", "rollout.temperature=0.7"],
            marks=pytest.mark.full,
        ),
        [
            *(
                "algorithm.loss_type=dr_grpo",
                "algorithm.scale_rewards=none",
                "algorithm.beta=1",
                "algorithm.kl_estimator=full_reverse",
            ),
            *(
                f"rollout.stop={STOPS}",
                "rollout.include_stop_str_in_output=false",
                "data.chat_template_kwargs={opening: <think>}",
            ),
        ],
        pytest.param(
            ["algorithm.mask_truncated_completions=true", "rollout.num_generations=24", "algorithm.beta=0.1"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            [
                "algorithm.loss_type=bnpo",
                "algorithm.beta=1",
                "algorithm.kl_estimator=low_var",
                "train.share_prompts=false",
            ],
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda options: options[0].removeprefix("algorithm."),
)
def test_every_kind_of_step_can_be_audited(options, tmp_path):
    # some groups have no advantage and are left out
    seldom = f"rewards.functions=[{{function: {world.folder()}/rewards.py:seldom}}]"
    done = world.train(tmp_path, seldom, *options, "debug.dump_steps=[2]", "train.max_tokens_per_micro_batch=120")
    assert done.code == 0, done.err
    check_stops(done, f"rollout.stop={STOPS}" in options)
    code, said = world.audit(done.folder, "--step", 2)
    assert code == 0, said


@pytest.mark.full
def test_a_step_with_teachers_of_rows_can_be_audited(tmp_path):
    """The policy after a prompt with the answer, the reference on some rows, and a model with rows of padding."""
    import transformers

    kinds, model = ("odd", "even"), transformers.AutoModelForCausalLM.from_pretrained(world.folder() / "model")
    rows = [json.dumps(dict(prompt=f"What is {a} + 2?", answer=str(a + 2), kind=kinds[a % 2])) for a in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    shutil.copytree(world.folder() / "model", tmp_path / "padded")
    torch.manual_seed(1)
    model.resize_token_embeddings(model.config.vocab_size + 6)
    for weight in model.parameters():
        weight.data.add_(0.02 * torch.randn_like(weight))
    model.save_pretrained(tmp_path / "padded")
    teachers = [
        dict(path="policy", prompt="{prompt} It is {answer}.", divergence="jensen_shannon"),
        dict(path="reference", where=dict(kind="odd"), over=100_000, weight=0.5),
        dict(path=str(tmp_path / "padded"), where=dict(kind=["even"]), divergence="forward"),
        dict(path=str(tmp_path / "padded"), over="sampled", weight=0.1),
    ]
    words = [f"data.train.source={tmp_path / 'rows.jsonl'}", f"algorithm.teacher={json.dumps(teachers)}"]
    words += ["rewards.functions=[]", "debug.dump_steps=[1,2]", "rollout.max_prompt_length=80"]
    done = world.train(tmp_path, *words, "algorithm.mask_truncated_completions=true", "rollout.num_generations=24")
    assert done.code == 0, done.err
    divergences = [line["teacher/reference/divergence"] for line in done.lines if "loss" in line]
    assert divergences[0] == 0 < divergences[1]
    for step in (1, 2):
        code, said = world.audit(done.folder, "--step", step)
        assert code == 0 and "divergence from padded_2" in said, said
    file = tmp_path / "padded" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|start|>", "<|begin|>"))
    done = world.train(tmp_path / "other", *words)
    assert done.code == 2 and "algorithm.teacher.2.path: token 256 of " in done.err
    (tmp_path / "padded" / "tokenizer_config.json").unlink()
    done = world.train(tmp_path / "unknown", *words)
    assert done.code == 2 and "padded has 264 tokens, the policy 258; name a teacher" in done.err


def in_text(change):
    """Return a function that applies `change` to step.json."""

    def apply(folder):
        contents = json.loads((folder / "step.json").read_text())
        change(contents)
        (folder / "step.json").write_text(json.dumps(contents))

    return apply


def in_rows(change):
    """Return a function that applies `change` to the rows of the first optimizer step."""

    def apply(folder):
        rows = load_file(folder / "update_1.safetensors")
        save_file(change(rows) or rows, folder / "update_1.safetensors")

    return apply


def add(name, amount, row=10):
    def change(rows):
        rows[name][row] += amount

    return in_rows(change)


def metric(name, factor):
    def change(contents):
        contents["updates"][0]["metrics"][name] *= factor

    return in_text(change)


def rename_tensor(folder):
    """Give a tensor of the optimizer's sample a name that transformers' model lacks."""
    file = folder / json.loads((folder / "step.json").read_text())["updates"][0]["optimizer"]
    tables = load_file(file)
    for kind in ("places", "values"):
        tables[f"{kind}.model.other.weight"] = tables.pop(f"{kind}.model.norm.weight")
    save_file(tables, file)


def text(change):
    return in_text(lambda contents: change(contents["samples"][3]))


TAMPERED = {
    "token of the batch": (add("token_id", 1), "tokens"),
    "text": (text(lambda s: s.update(response=s["response"] + "x")), "tokens"),
    "ending": (
        text(lambda s: s.update(finish_reason={"stop": "length", "length": "stop"}[s["finish_reason"]])),
        "tokens",
    ),
    "token left out": (
        in_rows(lambda rows: {name: row[1:].clone() for name, row in rows.items()}),
        "masks, optimizer step 1",
    ),
    "token counted twice": (
        in_rows(lambda rows: {name: torch.cat([row, row[-1:]]) for name, row in rows.items()}),
        "masks, optimizer step 1",
    ),
    "token of no sample": (add("sample", 99), "masks, optimizer step 1"),
    "reward": (text(lambda s: s.update(reward=s["reward"] + 0.01)), "rewards"),
    "reward of a function of ours": (text(lambda s: s["rewards"].update(format=1.0)), "rewards"),
    "advantage": (text(lambda s: s.update(advantage=s["advantage"] * 1.001)), "advantages"),
    "advantage of a token": (add("advantage", 0.001), "advantages in the batch, optimizer step 1"),
    "rollout log-prob of a token": (add("rollout_logprobs", 0.001), "rollout log-probs, optimizer step 1"),
    "policy log-prob": (add("policy_logprobs", 0.01), "policy log-probs, optimizer step 1"),
    "old log-prob": (add("old_logprobs", -0.01), "old log-probs, optimizer step 1"),
    "reference log-prob": (add("ref_logprobs", 0.01), "reference log-probs, optimizer step 1"),
    "infinite log-prob": (add("policy_logprobs", -float("inf")), "policy log-probs, optimizer step 1"),
    "all log-probs a little": (
        in_rows(lambda rows: rows | {"policy_logprobs": rows["policy_logprobs"] + 5e-5}),
        "policy log-probs, optimizer step 1",
    ),
    "entropy": (add("entropy", 0.01), "entropy, optimizer step 1"),
    "kl": (metric("kl", 1.5), "mean kl, optimizer step 1"),
    "mismatch": (metric("token_mult_prob_error", 1.001), "mean token_mult_prob_error, optimizer step 1"),
    "denominator": (
        in_text(lambda contents: contents["updates"][0].update(denominator=7)),
        "denominator, optimizer step 1",
    ),
    "loss": (metric("loss", 1.01), "loss, optimizer step 1"),
    "gradient norm": (metric("grad_norm", 1.001), "grad_norm, optimizer step 1"),
    "tensor of another model": (rename_tensor, "weights in the optimizer, optimizer step 1"),
}


def _audit_tampered(dump, scratch):
    """The audit's exit code and first difference for each way to tamper with the dump of a second step."""
    from megagrpo.proof.audit.audit_checks import check_step
    from megagrpo.proof.audit.audit_compare import verdict
    from megagrpo.proof.audit.saved import load_step

    found = {}
    for name, (change, _) in TAMPERED.items():
        copy = scratch / name / "dumps" / "step_000002"
        shutil.copytree(dump, copy)
        change(copy)
        checks = []
        for check in check_step(load_step(scratch / name, 2)):
            checks.append(check)
            if not check.passed:
                break
        found[name] = checks[-1].quantity, checks[-1].passed, verdict(checks)
    return found


@pytest.mark.full
def test_every_changed_number_is_the_first_that_is_named(dumped, tmp_path):
    found = run_ranks(_audit_tampered, 1, dumped.folder / "dumps" / "step_000002", tmp_path)[0]
    for name, (_, quantity) in TAMPERED.items():
        assert found[name][:2] == (quantity, False), name
    assert "differs first in policy log-probs, optimizer step 1 at sample" in found["policy log-prob"][2]
    assert "off by 1.00e-02 where" in found["policy log-prob"][2]
    code, said = world.audit(tmp_path / "gradient norm", "--step", 2)
    assert code == 1 and said.splitlines()[-1].startswith("differs first in grad_norm, optimizer step 1: the run has ")


def test_a_dump_that_is_not_there_is_answered_with_those_that_are(dumped, tmp_path):
    assert world.audit(dumped.folder, "--step", 7) == (
        2,
        f"--step: {dumped.folder} holds no dump of step 7; it has 1, 2\n",
    )
    assert world.audit(tmp_path, "--step", 1) == (
        2,
        f"--step: {tmp_path} holds no dump of step 1; it has none: set debug.dump_steps\n",
    )
    code, said = world.audit(dumped.folder, "--step", 1, "--model", str(tmp_path))
    assert code == 2 and said.startswith(f"--model: {tmp_path} holds no config.json; give the folder of the model")
    assert world.audit(dumped.folder, "--step", 1, "--nonsense")[0] == 2 and world.audit()[0] == 2
    code, said = world.audit("--help")
    assert code == 0 and "float32   token 0.0002  average 2e-05" in said


def test_a_dump_that_cannot_be_written_is_given_up_and_the_run_goes_on(dumped, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "dumps").write_text("in the way")
    done = run(tmp_path, *OPTIONS, "debug.dump_steps=[1]")
    assert "warning: dumping step 1 failed; training continues: " in done.out
    assert [line["loss"] for line in done.metrics] == [line["loss"] for line in dumped.metrics]
