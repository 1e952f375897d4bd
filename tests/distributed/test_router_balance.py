"""The load-balancing loss of the router: transformers' own of one batch, its gradient, and the same in every layout."""

from pathlib import Path

import pytest
import torch
import transformers
from ranks import run_ranks
from test_expert_parity import TP2, assert_equal
from test_gradient_parity import run_step
from tiny_policy import Case, hf_folder, samples
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megagrpo.audit import naive

COEFFICIENT = 20.0  # as much gradient as the policy loss
BALANCE = dict(router_aux_loss_coef=COEFFICIENT)
LAYOUTS = [
    Case("ep2", 2, dict(ep=2), algorithm=BALANCE),
    Case("tp2_ep2_etp1", 2, TP2 | dict(ep=2, etp=1), algorithm=BALANCE),
    Case("pp2_ep2", 4, dict(pp=2, ep=2), algorithm=BALANCE),
    Case("cp2_ep2", 2, dict(cp=2, ep=2), algorithm=BALANCE),
    Case(
        "small_micro_batches_recompute", 1, {}, model=dict(recompute="full"), train=dict(max_tokens_per_micro_batch=40), algorithm=BALANCE
    ),
    Case("shared_prompts_dp2", 2, {}, share_prompts=True, algorithm=BALANCE),
]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """(folder, one process's step with the balancing loss, and without)."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    run_ranks(hf_folder, 1, "qwen3_moe", folder)
    balanced = run_step(Case("one process", 1, {}, algorithm=BALANCE), folder, folder / "balanced.pt")
    return folder, balanced, run_step(Case("one process", 1, {}), folder, folder / "plain.pt")


def in_transformers(folder: Path) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss over the places whose next token is of a response, and its gradient by each router's weight; the latter as `audit` has it
    as well."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # as test_gradient_parity moves the policy
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.sin(40 * parameter))
    found = [model(sample.token_ids[None], output_router_logits=True).router_logits for sample in samples()]
    masks = []
    for sample in samples():
        before_a_response = sample.response_mask.roll(-1)
        before_a_response[-1] = False
        masks.append(before_a_response)
    logits = tuple(torch.cat(layer) for layer in zip(*found, strict=True))
    loss = load_balancing_loss_func(logits, 8, 2, attention_mask=torch.cat(masks)[None].long())
    loss.backward()
    theirs = gradients_of_routers(model)
    rows = torch.cat([naive.router_probabilities(model, s.token_ids, int((~s.response_mask).sum())) for s in samples()])
    (rows @ naive.balancing_slope(rows.detach(), 2)).sum().backward()
    return loss.item(), theirs, gradients_of_routers(model)


def gradients_of_routers(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    model.zero_grad()
    return found


def test_the_loss_and_its_gradient_are_those_of_transformers(steps):
    folder, balanced, plain = steps
    ((loss, gradients, audited),) = run_ranks(in_transformers, 1, folder)
    assert balanced["metrics"]["aux_loss"] == pytest.approx(loss, rel=1e-5)
    assert "aux_loss" not in plain["metrics"] and balanced["metrics"]["loss"] == plain["metrics"]["loss"]
    for name, expected in gradients.items():
        found = (balanced["gradients"][name] - plain["gradients"][name]) / COEFFICIENT
        assert ((found - expected).norm() / expected.norm()).item() < 1e-4, name
        torch.testing.assert_close(audited[name], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_the_balanced_gradient_is_the_same_in_every_layout(case, steps, tmp_path):
    folder, balanced, _ = steps
    assert_equal(run_step(case, folder, tmp_path / "found.pt"), balanced)
