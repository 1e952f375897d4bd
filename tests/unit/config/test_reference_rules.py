"""Conflicting settings of the KL and its reference are refused with a reason."""

import math

import pytest
from pydantic import ValidationError

from megagrpo.config import RunConfig
from tests.unit.for_each import for_each

NEEDED = dict(
    model=dict(path="x"), data=dict(train=dict(source="x")), rewards=dict(functions=[dict(function="exact_number")])
)
IN_REWARD = dict(beta=0.1, kl_in_reward=True, kl_estimator="k1")


def config(algorithm=None, **sections) -> RunConfig:
    return RunConfig.model_validate(NEEDED | sections | dict(algorithm=algorithm or {}))


@for_each(
    ("sections", "problem"),
    [
        (
            dict(algorithm=IN_REWARD | dict(beta=0)),
            "algorithm.kl_in_reward: True needs a reference, but algorithm.beta is 0; raise beta",
        ),
        (dict(algorithm=dict(teacher=dict(weight=0.5))), "algorithm.teacher.0.path: the teacher has no model"),
        *(
            (
                dict(algorithm=dict(teacher=dict(path="y", weight=w))),
                "algorithm.teacher.0.weight: -1 is negative, which",
            )
            for w in (-1, {1: 0.5, 9: -1.0})
        ),
        *(
            (dict(algorithm=dict(teacher=dict(path="y") | teacher)), f"algorithm.teacher.0.{problem}")
            for teacher, problem in (
                (dict(weight=1e308), "weight: 1e+308 is above 1e+06: gradients overflow; lower it"),
                (dict(weight=math.nan), "weight.float"),
                (dict(weight={5: 1.0}), "weight: has no weight for step 1; add it, such as `1: 0`"),
                (dict(where={"kind": []}), "where: kind has no value, so that no row is taught; name one"),
                (dict(path="policy"), "path: the policy cannot learn from itself after the same prompt; set"),
                (dict(over=0), "over"),
                (dict(urls=["http://h"]), "over: vocabulary is more than servers send; set it to sampled, or a number"),
                (dict(urls=["h:1"], over=5), "urls: h:1 is no address of a server; write http://HOST:PORT"),
                (dict(urls=["http://h/v1"], over=5), "urls: http://h/v1 is no address"),
                (dict(urls=["http://h"], over=5, path="reference"), "path: reference is no served model; name the"),
            )
        ),
        *(
            (
                dict(algorithm=dict(teacher=dict(path="y", over=5, urls=["http://h"])), rollout=rollout),
                "algorithm.teacher.0.urls: servers report log-probs at temperature 1 without changed logits; sample so",
            )
            for rollout in (dict(temperature=0.5), dict(logit_bias={5: 1.0}), dict(repetition_penalty=1.1))
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y", weight=0)), rewards=dict(functions=[])),
            "algorithm.teacher.0.weight: every weight is 0, and rewards.functions is empty, so that nothing trains",
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y", weight={0: 1.0}))),
            "algorithm.teacher.0.weight: 0 is not a step, which begin at 1",
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y", over="sampled", divergence="forward"))),
            "algorithm.teacher.0.divergence: forward needs distributions, but over is sampled; set it to reverse",
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y")), rollout=dict(top_p=0.9)),
            "algorithm.teacher.0.divergence: reverse compares the same tokens, but rollout.top_p, top_k and min_p",
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y")), train=dict(fused_logprobs=True)),
            "train.fused_logprobs: true writes no logits, which a teacher needs; set it to false",
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y")), data=dict(train=dict(source="x"), images=True)),
            "algorithm.teacher: a teacher sees no images",
        ),
        (
            dict(algorithm=dict(teacher=dict(path="y"), dynamic_sample=True), rewards=dict(functions=[])),
            "algorithm.dynamic_sample: true compares rewards, but rewards.functions is empty",
        ),
        (
            dict(
                algorithm=dict(teacher=dict(path="y")),
                rewards=dict(functions=[]),
                data=dict(train=dict(source="x"), eval=dict(source="y")),
            ),
            "rewards.functions: held-out prompts need a function that scores them; name one in rewards.functions, with",
        ),
        (dict(algorithm=dict(sync_ref_model=True)), "algorithm.sync_ref_model: True needs a reference"),
        (dict(model=dict(path="x", reference_path="y")), "model.reference_path: y needs a reference"),
        (
            dict(algorithm=dict(beta=0.1, sync_ref_model=True), lora=dict(rank=4)),
            "algorithm.ref_model_mixup_alpha: 0.6 mixes two adapters, which is no adapter of rank 4; set it to 1",
        ),
        (
            dict(
                algorithm=dict(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=1),
                lora=dict(rank=4),
                model=dict(path="x", reference_path="y"),
            ),
            "model.reference_path: y has other weights below the adapters, and checkpoints hold adapters only; "
            "set sync_ref_model to false",
        ),
        (
            dict(algorithm=IN_REWARD | dict(kl_estimator="k3")),
            "algorithm.kl_estimator: k3 is not supported with kl_in_reward; set it to k1",
        ),
        (
            dict(algorithm=IN_REWARD | dict(use_bias_correction_kl=True)),
            "algorithm.use_bias_correction_kl: true corrects a KL term",
        ),
        (
            dict(algorithm=IN_REWARD | dict(multi_objective_aggregation="normalize_then_sum")),
            "algorithm.kl_in_reward: true changes the summed reward, but normalize_then_sum normalizes each function "
            "separately; choose",
        ),
        (
            dict(algorithm=dict(steps_per_generation=5), rollout=dict(prompts_per_step=4, num_generations=2)),
            "algorithm.steps_per_generation: 5 does not divide the step's 8 samples, rollout.prompts_per_step 4 x "
            "num_generations 2; use 4",
        ),
        (
            dict(
                algorithm=dict(steps_per_generation=2, num_iterations=3),
                run=dict(max_steps=2),
                train=dict(warmup_steps=13),
            ),
            "train.warmup_steps: 13 exceeds the run's 12 optimizer steps",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(sections, problem):
    with pytest.raises(ValidationError) as caught:
        config(**sections)
    assert problem in str(caught.value)


def test_what_makes_sense_is_not():
    chosen = config(
        IN_REWARD | dict(sync_ref_model=True, steps_per_generation=4, num_iterations=2),
        model=dict(path="x", reference_path="y"),
    )
    assert chosen.algorithm.updates_per_step == 8 and chosen.algorithm.ref_model_mixup_alpha == 0.6
    assert chosen.algorithm.ref_model_sync_steps == 512 and not chosen.algorithm.leaves_out_zero_advantage
