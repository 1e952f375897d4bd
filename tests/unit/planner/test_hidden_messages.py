"""Overlaps hide the smaller of two times, a dispatcher sends a token once per rank, and `--gpu` plans for the placed
ranks."""

from itertools import combinations

import pytest

from megagrpo.commands.api.plan_call import plan
from megagrpo.config import ParallelSection, load_config
from megagrpo.families.hf_config import load_hf_config, parse_hf_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.hidden_messages import Direction, Overlap, overlap_row, refused_by_model, sent_rows
from megagrpo.planner.costs.planned_memory import in_flight
from megagrpo.planner.costs.workload import expected_lengths
from megagrpo.planner.rules.plan_problems import expert_problems
from megagrpo.planner.times.pass_times import pass_seconds
from megagrpo.planner.times.step_times import step_times
from tests.family_examples import RELEASES
from tests.unit.families.published_configs import published

FOUR_NODES = "megagrpo:qwen3_30b_a3b_4nodes"
ALONE = ["train.overlap=[]", "parallel.pp=2", "parallel.vpp=2"]
FORWARD, BACKWARD = Direction(5, 3, 10, 2, 4), Direction(10, 6, 22, 3, 4)


def made(*overrides: str):
    config = load_config(FOUR_NODES, [*ALONE, *overrides])
    return config, load_hf_config(shape_folder(config.model.path))


def overlap_of(*overrides: str) -> Overlap:
    return Overlap(*made(*overrides), FORWARD, BACKWARD, micro_batches=100)


@pytest.mark.parametrize(
    ("overrides", "forward", "backward"),
    [
        (["train.overlap=[tp]"], 2, 3),
        (["train.overlap=[weight_gradients]"], 0, 2),  # half of 4, beside half of 6
        (["train.overlap=[weight_gradients]", "model.recompute=full"], 0, 1),  # a quarter of 4, beside a third of 6
        (["train.overlap=[tp,weight_gradients]"], 2, 5),
        (["train.overlap=[experts]"], 4 * 0.975, 4 * 0.975),  # 5 of 200 forward passes of chunks warm up
        (["train.overlap=[tp,experts]"], 2 + 4 * 0.975, 3 + 4 * 0.975),
    ],
)
def test_the_smaller_of_two_times_is_hidden(overrides, forward, backward):
    overlap = overlap_of(*overrides)
    assert overlap.hidden_by(overlap.config.train.overlap) == pytest.approx((forward, backward))


def test_messages_that_are_longer_than_the_computation_beside_them_are_hidden_in_part():
    slow = Direction(5, 3, 10, 20, 40)
    assert Overlap(*made(), slow, slow, 100).hidden_by(["tp"]) == (5, 5)


def test_weights_of_all_updates_but_the_last_are_gathered_beside_a_forward_pass():
    def times_of(*overrides):
        config, model = made("algorithm.steps_per_generation=4", *overrides)
        times = step_times(config, model, 16, GPUS["h100"], expected_lengths(config))
        return times, pass_seconds(config, model, 16, GPUS["h100"], expected_lengths(config)).first

    (on, first), (off, _) = times_of("train.overlap=[param_gather]"), times_of()
    hidden = on.overlap["param_gather"]
    assert 0 < hidden == off.overlap["param_gather"] <= 3 * first
    assert off.seconds["train"] - on.seconds["train"] == pytest.approx(hidden)


def test_gains_are_of_what_config_and_model_allow():
    overlap = overlap_of("train.overlap=[tp]", "parallel.vpp=1")
    assert overlap.gains() == {"tp": 5, "weight_gradients": 2}  # one update, no virtual stages, no shared experts
    row = overlap_row(overlap.config, overlap.model, overlap.gains())
    assert row == [("overlap", "tp hides 5.00 s, weight_gradients is off and would hide 2.00, dispatcher alltoall")]


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_rows_of_a_token_are_those_of_all_its_possible_experts(dispatcher):
    _, model = made()
    few = model.raw | dict(num_experts=8, num_experts_per_tok=3)
    small = parse_hf_config(few)
    choices = list(combinations(range(8), 3))
    rows = [3 if dispatcher == "alltoall" else len({expert // 2 for expert in choice}) for choice in choices]
    assert sent_rows(ParallelSection(ep=4, expert_dispatcher=dispatcher), small) == pytest.approx(
        sum(rows) / len(choices)
    )


def test_overlaps_of_a_model_without_experts_or_with_latent_attention_are_problems():
    dense = load_config("megagrpo:qwen2.5_7b_1node", ["parallel.ep=2", "train.overlap=[weight_gradients]"])
    model = load_hf_config(shape_folder(dense.model.path))
    assert [str(p) for p in expert_problems(dense, model)] == [
        "train.overlap: weight_gradients, but qwen2 has no experts; leave it out"
    ]
    config, mixture = made("train.overlap=[shared_experts]")
    assert [str(p) for p in expert_problems(config, mixture)] == [
        "train.overlap: shared_experts, but qwen3_moe has no shared experts; leave it out"
    ]
    config, _ = made("train.overlap=[experts]")
    nemotron = parse_hf_config(RELEASES["nemotron_h"])
    assert [str(p) for p in expert_problems(config, nemotron) if "of a block in turn" in str(p)] == [
        "train.overlap: experts, but it runs attention and experts of a block in turn, and a block of nemotron_h has one "
        "of them; leave it out"
    ]
    deepseek = load_config("megagrpo:deepseek_v3_32nodes", ["train.overlap=[tp]"])
    (problem,) = expert_problems(deepseek, load_hf_config(shape_folder(deepseek.model.path)))
    assert "tp, but Transformer Engine cannot overlap deepseek_v3's latent attention" in str(problem)


@pytest.mark.parametrize("release", ["Gemma 4 26B-A4B", "release of granitemoe"])
def test_messages_of_experts_do_not_overlap_in_a_model_whose_hooks_megatrons_schedule_skips(release):
    model = parse_hf_config(published(release))
    config, _ = made("train.overlap=[experts]")
    (said,) = [str(problem) for problem in expert_problems(config, model)]
    assert said.startswith("train.overlap: experts, but Megatron's combined schedule leaves out the factors on outputs")
    assert ("norms of their own" if model.block_scales else "no shared experts") in refused_by_model(
        "shared_experts", model
    )


@pytest.mark.parametrize(
    ("name", "ranks"), [("qwen2.5_7b_1node", 8), ("qwen3_30b_a3b_4nodes", 16), ("qwen3_235b_a22b_16nodes", 64)]
)
def test_a_kind_of_gpu_plans_for_the_ranks_of_the_nodes_and_says_so(name, ranks):
    found = plan(f"megagrpo:{name}", gpu="h100")
    assert found.problems == []
    assert dict(found.rows)["assumed"].startswith(f"{ranks} rank(s), for run.nodes ")
    assert "assumed" not in dict(plan(f"megagrpo:{name}", gpu="h100", world_size=ranks).rows)


def test_a_layout_that_does_not_fit_the_nodes_is_planned_on_as_few_ranks_as_it_needs():
    found = plan("megagrpo:qwen2.5_7b_1node", gpu="h100", overrides=["parallel.cp=16"])
    assert dict(found.rows)["assumed"].startswith("32 rank(s), as few as the layout needs, because it does not fit")


def test_a_backward_pass_beside_another_forward_pass_keeps_one_more_micro_batch():
    layouts = {"parallel.pp=1": (1, 2), "parallel.vpp=2": (2.5, 3)}  # micro-batches on the first stage
    for layout, (alone, beside) in layouts.items():
        override = [layout, *(["parallel.vpp=1"] if "pp=1" in layout else [])]
        assert in_flight(made(*override)[0], 0) == alone
        assert in_flight(made(*override, "train.overlap=[experts]")[0], 0) == beside
