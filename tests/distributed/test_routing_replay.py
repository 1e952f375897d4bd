"""Routers take the given experts in every layout, and the gradient is the one of these experts: equal to one process,
and to transformers in float64."""

import functools

import pytest
import torch
from dumped_steps import FUNCTIONS, dump_step, make_model
from layouts import AXES, EXPERTS, config_of, parametrize_rows, ranks
from ranks import run_ranks
from suites import usual
from test_dump_layouts import audit
from test_gpt_oss import RAW as GPT_OSS
from test_latent_parity import V2_LITE, V3
from tiny_policy import SHAPES, few_samples, tiny_model, tiny_run

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.moe.rank_routed_experts import RankTokens, rank_columns
from megagrpo.policy.moe.router_losses import routers
from megagrpo.policy.moe.routing_replay import RouteSlot, route_shape
from megagrpo.proof.verify.shrink import plainly, random_routes, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, policy_gradient, prepare, relative_error, take_step

FEW = (
    dict(recompute="full"),
    dict(recompute="selective", share_prompts=True),
    dict(dp=2, ep=2, distributed_optimizer=True),
    dict(pp=2, vpp=2, recompute="full", budget="tight"),
    dict(tp=2, cp=2, sequence_parallel=True, share_prompts=True, recompute="full", ep=2),
)

LAYERS = {"qwen3_moe": 3, "mixtral": 4}  # with experts


def row_of(model: str = "qwen3_moe", **options) -> dict:
    return {axis: values[0] for axis, values in AXES.items()} | dict(model=model) | options


def config(row: dict, replay: str = "engine") -> RunConfig:
    made = config_of(row)
    return made.model_copy(update=dict(rollout=made.rollout.model_copy(update=dict(routing_replay=replay))))


@functools.cache
def one_process(model: str, loss: str, replay: str) -> Outcome:
    settings = plainly(config(row_of(model, loss=loss), replay))
    return run_ranks(take_step, 1, settings, tiny_model(model), few_samples())[0]


def worst_gradient(found: Outcome, expected: Outcome) -> tuple[float, str]:
    return max((relative_error(found.gradients[name], gradient), name) for name, gradient in expected.gradients.items())


def check(row: dict, replay: str) -> None:
    (found, *_) = run_ranks(take_step, ranks(row), config(row, replay), tiny_model(row["model"]), few_samples())
    expected = one_process(row["model"], row["loss"], replay)
    assert worst_gradient(found, expected) < (1e-5, "")
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    agreement = {name: share for name, share in expected.metrics.items() if name.startswith("routing/")}
    assert len(agreement) == 2 + LAYERS[row["model"]]
    assert (agreement["routing/agreement_min"] < 1) == (replay == "engine")
    assert {name: found.metrics.get(name) for name in agreement} == pytest.approx(agreement, abs=1e-9)


def test_layers_with_experts_may_run_again_on_their_own():
    row = row_of(pp=2, recompute="selective")
    settings = config(row)
    settings = settings.model_copy(update=dict(model=settings.model.model_copy(update=dict(recompute_modules=["moe"]))))
    (found, *_) = run_ranks(take_step, ranks(row), settings, tiny_model("qwen3_moe"), few_samples())
    assert worst_gradient(found, one_process("qwen3_moe", row["loss"], "engine")) < (1e-5, "")


def pytest_generate_tests(metafunc):
    parametrize_rows(metafunc, models=EXPERTS)


@pytest.mark.full
def test_a_step_with_the_engines_routes_is_the_same_in_all_layouts(row):
    check(row, "engine")


# ------------------------------------------------------------------------------------------- counted, expert by expert


def taken_experts(settings: RunConfig, model: HfConfig) -> tuple[int, int, int]:
    """How many experts the routers of this rank take in a train step, runs inside of checkpoints counted twice; how
    many of them differ from the given ones; and how many the routers would choose themselves."""
    layout, shape = init_layout(settings.parallel), route_shape(model)
    policy, batch, _ = prepare(settings, model, layout, few_samples())
    known = random_routes(few_samples(), shape)
    tokens = RankTokens.of(batch.micro_batches, layout.parallel, layout.cp_rank, layout.tp_rank)
    columns = rank_columns(shape, layout.parallel, layout.pp_rank)
    of_tokens = {}  # by micro-batch and router: what its map of experts must be
    for number, (start, stop) in enumerate(zip(tokens.borders, tokens.borders[1:], strict=False)):
        rows = torch.zeros(stop - start, len(columns), shape.experts, dtype=torch.bool)
        mask = torch.zeros(stop - start, dtype=torch.bool)
        for i, (sample, position) in enumerate(
            zip(tokens.samples[start:stop], tokens.positions[start:stop], strict=True)
        ):
            if sample >= 0 and position < len(known[sample]):
                mask[i] = True
                rows[i].scatter_(1, torch.from_numpy(known[sample][position][columns].astype("i8")), True)
        of_tokens[number] = rows, mask
    seen = []
    for column, router in enumerate(routers(policy.chunks)):
        router.register_forward_hook(lambda _, inputs, out, column=column: seen.append((column, out[1].detach().cpu())))
    policy.backward(batch, policy_gradient, 1)
    total = wrong = 0
    for column, routing_map in seen:
        fits = [
            (routing_map[mask] != rows[mask][:, column]).sum().item()
            for rows, mask in of_tokens.values()
            if len(mask) == len(routing_map)
        ]
        total, wrong = total + int(routing_map.sum()), wrong + min(fits)
    return total, wrong, len(seen)


@pytest.mark.parametrize("options", usual(FEW, 0), ids=str)
def test_every_expert_that_a_router_takes_was_given(options):
    row = row_of(**options)
    found = run_ranks(taken_experts, ranks(row), config(row), tiny_model("qwen3_moe"))
    assert all(wrong == 0 for _, wrong, _ in found) and sum(total for total, _, _ in found) > 0


def counted_agreement(settings: RunConfig, model: HfConfig) -> tuple[dict[str, tuple], dict[int, list[float]]]:
    """The metrics of agreement as (sum, count), and on one rank the same by hand: layer -> [sum, count]."""
    layout, shape = init_layout(settings.parallel), route_shape(model)
    policy, batch, _ = prepare(settings, model, layout, few_samples())
    naive = {layer: [0.0, 0.0] for layer in shape.layers}
    original = RouteSlot.get_replay_topk

    def by_hand(self, scores, topk, *groups):
        if self.given is not None and self.counted is not None:
            of_layer = naive[shape.layers[self.column]]
            for token in self.counted.nonzero()[:, 0].tolist():
                chosen = sorted(range(scores.shape[1]), key=lambda expert: -float(scores[token, expert]))[:topk]
                of_layer[0] += len(set(chosen) & set(self.given[token].tolist()))
                of_layer[1] += topk
        return original(self, scores, topk, *groups)

    RouteSlot.get_replay_topk = by_hand
    metrics = policy.backward(batch, policy_gradient, 1)
    counted = {name: (m.sum, m.count) for name, m in metrics.items() if name.startswith("routing/")}
    return counted, naive


@pytest.mark.parametrize("layouts", usual([[FEW[4]], [*FEW[1:4]]], 0), ids=["all axes", "others"])
def test_the_agreement_of_a_layer_counts_each_loss_token_once(layouts):
    ((alone, naive),) = run_ranks(counted_agreement, 1, config(row_of()), tiny_model("qwen3_moe"))
    assert {f"routing/agreement/{layer}": tuple(counts) for layer, counts in naive.items()}.items() <= alone.items()
    total = tuple(map(sum, zip(*naive.values(), strict=True)))
    assert alone["routing/agreement"] == total
    assert alone["routing/agreement_min"] == (min(same / every for same, every in naive.values()), total[1])
    for options in layouts:
        row = row_of(**options)
        assert run_ranks(counted_agreement, ranks(row), config(row), tiny_model("qwen3_moe"))[-1][0] == alone


# ---------------------------------------------------------------------------------------------------- broken on purpose


def broken_recompute(*arguments) -> Outcome | None:
    """Slots that give the routes of other tokens to a layer that runs again."""
    original = RouteSlot.get_replay_topk

    def reversed_routes(self, *given):
        if self.given is None and self.to_recompute:
            self.to_recompute[0] = self.to_recompute[0].flip(0)
        return original(self, *given)

    RouteSlot.get_replay_topk = reversed_routes
    return take_step(*arguments)


def test_a_layer_that_runs_again_with_other_routes_is_found():
    row = row_of(pp=2, vpp=2, recompute="full", budget="tight")
    (found, *_) = run_ranks(broken_recompute, ranks(row), config(row), tiny_model("qwen3_moe"), few_samples())
    assert worst_gradient(found, one_process("qwen3_moe", row["loss"], "engine"))[0] > 1e-2


def recomputed_too_rarely(settings: RunConfig, model: HfConfig) -> str:
    policy, batch, _ = prepare(settings, model, init_layout(settings.parallel), few_samples())
    with pytest.raises(RuntimeError) as caught, policy.replay.passing(trains=True):
        with torch.no_grad(), policy.replay.forward(policy.model[0], batch.micro_batches[0].routes, None):
            m = batch.micro_batches[0]
            for router, slot in zip(routers(policy.chunks), policy.replay._slots, strict=True):
                slot.get_replay_topk(
                    torch.zeros(m.num_tokens, router.num_experts), slot.given.shape[1], None, None, None
                )
    return str(caught.value)


def test_a_layer_that_does_not_run_again_is_an_error():
    (said,) = run_ranks(recomputed_too_rarely, 1, config(row_of()), tiny_model("qwen3_moe"))
    assert said == "routing replay: 3 forward passes of layers were not recomputed"


def test_routes_of_other_tokens_are_an_error():
    slot = RouteSlot(0, None)
    slot.given = torch.zeros(3, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"routes \[3, 2\] for 4 tokens with 2 experts each"):
        slot.get_replay_topk(torch.zeros(4, 8), 2, None, None, torch.topk)


# ------------------------------------------------------------------------------------------- the oracle in transformers

FAMILIES = {
    "qwen3_moe": (SHAPES["qwen3_moe"], dict(ep=2), dict(algorithm=dict(router_aux_loss_coef=0.1))),
    "mixtral": (SHAPES["mixtral"], dict(pp=2), {}),
    "deepseek_v3": (V3, dict(tp=2, sequence_parallel=True, ep=2, etp=1), {}),
    "deepseek_v2": (V2_LITE, dict(pp=2), {}),
    "gpt_oss": (GPT_OSS, dict(cp=2), {}),
}


def dump(raw, parallel, sections, replay, root):
    algorithm = dict(beta=0.5, num_iterations=2) | sections.get("algorithm", {})
    settings = tiny_run(
        parallel,
        algorithm=algorithm,
        debug=dict(dump_steps=[1]),
        train=sections.get("train", {}),
        rewards=dict(functions=FUNCTIONS),
        model=dict(tokenizer="/nowhere"),
        rollout=dict(temperature=0.8, routing_replay=replay),
    )
    return dump_step(settings, init_layout(settings.parallel), root / "model", root)


@pytest.mark.parametrize("replay", usual(["engine", "trainer"], 0))
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.full) for name in list(FAMILIES)[1:])]
)
def test_log_probs_loss_and_gradient_norm_at_these_routes_agree_with_float64(family, replay, tmp_path, capfd):
    raw, parallel, sections = FAMILIES[family]
    run_ranks(make_model, 1, tmp_path / "model", shrink_model(raw, ParallelSection(tp=2, pp=2, ep=2, etp=2)))
    run_ranks(dump, 2, raw, parallel, sections, replay, tmp_path)
    assert run_ranks(audit, 1, tmp_path, 1) == [0], capfd.readouterr().out
