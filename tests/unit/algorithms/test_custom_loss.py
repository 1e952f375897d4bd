"""A custom loss: loaded from a file, tried before a run, and averaged as configured."""

import re
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import ConfigError, ProblemError, RunConfig, load_config
from megagrpo.config.sections.loss_table import LOSSES
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.planner import plan
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.train_types import LossInputs
from tests.unit.for_each import for_each

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"
AVERAGES = {"grpo": "sequence_means", "dapo": "tokens", "dr_grpo": "fixed_length", "luspo": "sequence_sums"}
SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"


def example() -> str:
    """The custom loss file from the page."""
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def clipped" in block
    )
    return code


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_loss.py").write_text(example())
    return tmp_path / "my_loss.py"


def settings(**algorithm):
    base = {
        "model": {"path": "x"},
        "data": {"train": {"source": "x"}},
        "rewards": {"functions": [{"function": "exact_number"}]},
    }
    return RunConfig.model_validate(base | {"algorithm": algorithm})


def step(config):
    """(loss, gradient [T], metrics) of a batch for which the policy differs from the one that sampled."""
    batch = pack(random_samples(), PackingRules(max_tokens=1000))
    (rows,) = batch.micro_batches
    old = rows.rollout_logprobs + 0.2 * torch.cos(3.0 * torch.arange(rows.num_tokens))
    policy = (old + 0.5 * torch.sin(1.0 * torch.arange(rows.num_tokens))).requires_grad_()
    output = make_loss(config.algorithm)(LossInputs(policy, torch.zeros_like(old), rows.with_terms(old_logprobs=old)))
    loss = output.numerator / denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length)
    return loss.item(), torch.autograd.grad(loss, policy)[0], output.metrics


@for_each("built_in", AVERAGES)
@for_each("options", [{}, dict(importance_correction="token_truncate"), dict(importance_sampling_level="sequence")])
def test_the_example_of_the_page_has_the_bits_of_the_loss_that_it_repeats(file, built_in, options):
    loss, gradient, _ = step(settings(loss_type=f"{file}:clipped", loss_average=AVERAGES[built_in], **options))
    expected, right, _ = step(settings(loss_type=built_in, **options))
    assert loss == expected != 0 and torch.equal(gradient, right) and gradient.any()


def test_an_empty_average_is_over_tokens(file):
    assert step(settings(loss_type=f"{file}:clipped"))[0] == step(settings(loss_type="dapo"))[0]


def test_the_example_is_as_short_as_the_page_says():
    assert len(example().strip().splitlines()) <= 12


def test_every_metric_but_the_clip_ratios_is_there(file):
    own, built_in = (step(settings(loss_type=name))[2] for name in (f"{file}:clipped", "dapo"))
    assert built_in.keys() - own.keys() == {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}


def test_samples_without_advantage_are_computed_because_a_loss_of_ones_own_may_teach_there(file):
    assert settings().algorithm.leaves_out_zero_advantage
    assert not settings(loss_type=f"{file}:clipped").algorithm.leaves_out_zero_advantage


def test_a_built_in_loss_keeps_its_average():
    with pytest.raises(
        ValueError,
        match=r"algorithm.loss_average: tokens only applies to a custom loss, but grpo averages by "
        r"sequence_means",
    ):
        settings(loss_type="grpo", loss_average="tokens")


def test_a_path_counts_from_the_folder_of_the_yaml(tmp_path, file, monkeypatch):
    (tmp_path / "run.yaml").write_text(SMALLEST + "algorithm: {loss_type: 'my_loss.py:clipped'}\n")
    monkeypatch.chdir("/")
    config = load_config(tmp_path / "run.yaml")
    assert config.algorithm.loss_type == f"{file}:clipped" and make_loss(config.algorithm)


BODIES = {
    "raised ZeroDivisionError: division by zero (": "return tokens.logprobs * (1 / 0)",
    "returned list, not a tensor; a loss takes (tokens, algorithm)": "return tokens.logprobs.tolist()",
    "returned torch.float32 [] for 8 tokens; a loss takes": "return tokens.logprobs.sum()",
    "returned torch.float32 [4] for 8 tokens": "return tokens.logprobs[:4]",
    "returned torch.int64 [8] for 8 tokens": "return tokens.logprobs.long()",
    "returned NaN or infinity for log-probs between -3 and 0": "return tokens.logprobs.log()",
    "has no gradient in tokens.logprobs": "return tokens.ratio.detach() * tokens.advantages",
    "has a gradient of NaN or "
    "infinity": "return (tokens.advantages * 0 + tokens.logprobs - tokens.logprobs.detach()).abs().sqrt()",
}


@for_each("said", BODIES)
def test_a_loss_that_cannot_be_used_is_refused_in_one_line_with_the_rule(tmp_path, said):
    name = f"{tmp_path}/bad.py:bad"
    (tmp_path / "bad.py").write_text(f"def bad(tokens, algorithm):\n    {BODIES[said]}\n")
    with pytest.raises(ProblemError) as refused:
        make_loss(settings(loss_type=name).algorithm)
    (problem,) = refused.value.problems
    assert problem.keys == ("algorithm.loss_type",) and str(problem).startswith(f"algorithm.loss_type: `{name}` {said}")
    assert "\n" not in str(problem)


def test_values_at_masked_tokens_do_not_count_when_a_loss_is_tried(tmp_path):
    body = "torch.where(tokens.sequences.mask, tokens.ratio * tokens.advantages, float('nan'))"
    (tmp_path / "own.py").write_text(f"import torch\n\n\ndef own(tokens, algorithm):\n    return {body}\n")
    assert make_loss(settings(loss_type=f"{tmp_path}/own.py:own").algorithm)


def test_a_wrong_signature_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("def bad(logprobs, old, advantages):\n    return logprobs\n")
    with pytest.raises(
        ProblemError, match=r"bad` cannot be called as a loss: missing a required argument: 'advantages'; a loss takes"
    ):
        make_loss(settings(loss_type=f"{tmp_path}/bad.py:bad").algorithm)


def test_a_file_that_is_missing_and_one_that_raises_are_named(tmp_path):
    with pytest.raises(
        ProblemError, match=rf"cannot be loaded: FileNotFoundError: no file {tmp_path}/none.py; correct the file"
    ):
        make_loss(settings(loss_type=f"{tmp_path}/none.py:f").algorithm)
    (tmp_path / "raises.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(
        ProblemError, match=rf"ModuleNotFoundError: No module named 'nothing_of_that_name' \({tmp_path}/raises.py:1\)"
    ):
        make_loss(settings(loss_type=f"{tmp_path}/raises.py:f").algorithm)


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.py:clipped", "no file {}/none.py"), ("my_loss.py:cliped", "defines no `cliped`; did you mean `clipped`?")],
)
def test_the_plan_finds_a_missing_file_and_a_missing_name_without_running_the_file(tmp_path, file, name, said):
    file.write_text("raise RuntimeError('was run')\n" + example())
    problems = plan(settings(loss_type=f"{tmp_path}/{name}"), 1, has_data=False).problems
    found = [p for p in problems if p.keys == ("algorithm.loss_type",)]
    assert len(found) == 1 and said.format(tmp_path) in found[0].text


@pytest.mark.parametrize(
    ("value", "got"), [("cisp", "'cisp'); did you mean cispo?"), ("7", "'7')"), ("my_loss.py", "'my_loss.py')")]
)
def test_what_is_neither_a_loss_nor_a_name_in_a_file_is_refused_with_the_choices(tmp_path, value, got):
    (tmp_path / "run.yaml").write_text(SMALLEST)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "run.yaml", [f"algorithm.loss_type={value}"])
    said = "algorithm.loss_type: must be 'grpo', 'bnpo', .*', or your own as FILE.py:NAME "
    assert re.fullmatch(said + re.escape(f"(got {got}"), str(refused.value.problems[0]))


def response(length):
    """A response of this many tokens, for which the policy differs from the one that sampled."""
    from megagrpo.proof.audit.naive_loss import Response

    generator = torch.Generator().manual_seed(length)
    rows = [-torch.rand(length, generator=generator, dtype=torch.float64) for _ in range(4)]
    return Response(
        rows[0].requires_grad_(), *rows[1:], places=torch.arange(length), advantage=torch.full((length,), -0.8).double()
    )


@pytest.mark.parametrize(
    "options", [{}, dict(importance_correction="token_mask", importance_correction_max=1.2)], ids=str
)
def test_the_audit_runs_the_loss_again_in_float64(file, options):
    from megagrpo.proof.audit.naive_loss import policy_term

    own, built_in = (settings(loss_type=name, **options).algorithm for name in (f"{file}:clipped", "dapo"))
    found, expected = (policy_term(response(9), algorithm, 0.0) for algorithm in (own, built_in))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_the_audit_of_a_run_whose_loss_is_gone_says_so_at_once(tmp_path):
    from megagrpo.proof.audit.audit_checks import check_step

    config = settings(loss_type=f"{tmp_path}/gone.py:f")
    with pytest.raises(
        ConfigError,
        match=r"algorithm.loss_type: `.*gone.py:f` cannot be loaded: .*; the audit runs the loss of the run",
    ):
        list(check_step(type("Step", (), {"config": config})()))


def test_every_row_has_its_term_in_the_trainer_and_in_the_audit():
    from megagrpo.algorithms import policy_losses
    from megagrpo.proof.audit import naive_loss

    for name, row in LOSSES.items():
        assert callable(getattr(policy_losses, row.policy_term)), name
        assert row.policy_term in naive_loss.TERMS, name
