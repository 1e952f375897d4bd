"""A NaN on one rank: every rank skips the optimizer step and names the same tensor. The step changes nothing, and
training continues as if it had not happened."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import Case, few_samples, tiny_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.process.phases import Phases
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.records.rows.dump import StepDumps
from megagrpo.records.writer import MetricsWriter
from megagrpo.train_types import TrainState
from megagrpo.trainer.alarms import Alarms, BrokenTraining
from megagrpo.trainer.policy_update import Learning

PLAIN, SHARDED = dict(distributed_optimizer=False), dict(distributed_optimizer=True)
CASES = [
    Case("one_rank", 1, {}, train=PLAIN),
    Case("tp2", 2, dict(tp=2), train=PLAIN),
    Case("pp2", 2, dict(pp=2), train=PLAIN),
    Case("pp2_vpp2_distributed_optimizer", 2, dict(pp=2, vpp=2), train=SHARDED),
    Case("dp2", 2, {}, train=PLAIN),
    Case("dp2_distributed_optimizer", 2, {}, train=SHARDED),
    Case("tp2_dp2_distributed_optimizer", 4, dict(tp=2), train=SHARDED),
]
DOWN = "model.layers.{}.mlp.down_proj.weight"


class Messages:
    """A sink that keeps the messages for the user."""

    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


class Training:
    """The learning part of one rank, with given batches."""

    def __init__(self, case, layout):
        settings, hf = case.config(beta=0.0), tiny_model("llama_tied")
        self.policy = MegatronPolicy(settings, layout, hf)
        fill_weights(self.policy, hf, layout)
        self.policy.weights_changed()
        self.batch = pack(
            few_samples(), packing_rules(settings, self.policy.shares_prompts), layout.dp_rank, layout.dp_size
        )
        self.loss, self.said = make_loss(settings.algorithm), Messages()
        writer = MetricsWriter.silent()
        writer._sinks["messages"] = self.said
        dumps = StepDumps(self.policy, Path("unused"), Path("unused"), writer.message)
        limits = settings.rollout, settings.train.max_skipped_steps
        self.alarms = Alarms(*limits, TrainState(), layout, "float32", False, "\n".join, writer.message)
        count_skip, state = self.alarms.count_skip, self.alarms.state
        self.learning = Learning(settings, self.policy, None, self.loss, state, dumps, Phases(), count_skip)

    def step(self):
        with self.learning.update(self.batch) as update:
            update.metrics = (
                self.policy.backward(update.batch, update.loss_fn, update.denominator) | self.policy.update()
            )
        return update.metrics

    def parameter(self, hf_name):
        """The parameter of this rank that holds the tensor."""
        return next(p for _, p, found in self.learning.weights() if hf_name in [block.name for block in found])

    def state(self):
        """Copies of everything that an optimizer step changes on this rank: weights, masters, moments, counts,
        schedule."""
        weights = [p.detach().clone() for chunk in self.policy.chunks for p in chunk.parameters()]
        inner = [o.optimizer for o in getattr(self.policy.optimizer, "chained_optimizers", [self.policy.optimizer])]
        states = [value.clone() for o in inner for state in o.state.values() for value in state.values()]
        masters = [p.detach().clone() for o in inner for group in o.param_groups for p in group["params"]]
        counts = [{k: v for k, v in group.items() if k != "params"} for o in inner for group in o.param_groups]
        assert len(states) >= 2 and all(s.any() for s in states[:2])
        return weights + states + masters, counts, dict(self.policy.scheduler.state_dict())


def same(one, other):
    return len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0])) and one[1:] == other[1:]


def _nan_token_in_the_loss(training, replica):
    """NaN for one token of the loss of one data-parallel replica."""

    def loss(inputs):
        output = training.loss(inputs)
        if training.policy.layout.dp_rank == replica:
            first = inputs.micro_batch.loss_mask.nonzero()[0, 0]
            return dataclasses.replace(output, numerator=output.numerator + math.nan * inputs.policy_logprobs[first])
        return output

    training.learning.loss_fn = loss
    return lambda: setattr(training.learning, "loss_fn", training.loss)


def _nan_in_a_gradient(training, rank, hf_name):
    """One NaN in the gradient of one rank's part of one tensor; the loss is finite."""
    if int(os.environ["RANK"]) != rank:
        return lambda: None

    def spoil(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[5] = math.nan
        return gradient

    return training.parameter(hf_name).register_hook(spoil).remove


def _infinite_weight(training, rank, hf_name):
    """One infinite element of one rank's part of one tensor."""
    if int(os.environ["RANK"]) != rank:
        return lambda: None
    element = training.parameter(hf_name).data.view(-1)[7:8]
    kept = element.clone()
    element.fill_(math.inf)
    return lambda: element.copy_(kept)


# The damaged replica and the first rank of its last stage; the damaged rank and layer.
LOSSES = list(zip(CASES, (0, 0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 1, 1, 2), strict=True))
GRADIENTS = [(CASES[1], 1, 2), (CASES[2], 0, 1), (CASES[3], 1, 3), (CASES[4], 1, 0), (CASES[6], 2, 3)]
WEIGHTS = [(CASES[0], 0, 1), (CASES[1], 1, 2), (CASES[2], 0, 1), (CASES[5], 1, 3)]


def _good_bad_good(case, faults):
    """For each fault in the second step: the run's messages, whether that step changed nothing, and whether the run
    ends like one without that step."""
    layout = init_layout(case.config().parallel)

    def run(plant=None, *arguments):
        training, unchanged = Training(case, layout), None
        training.step()
        if plant is not None:
            before = training.state()
            mend = plant(training, *arguments)
            metrics = training.step()
            mend()
            unchanged = same(before, training.state())
            assert training.learning.state.skipped_steps == 1 and "grad_norm" not in metrics
        metrics = training.step()
        assert training.learning.state.skipped_in_a_row == 0 and metrics["grad_norm"].value > 0
        return training.said.lines, unchanged, training.state(), metrics

    _, _, good, good_metrics = run()
    ends = [run(*fault) for fault in faults]
    return [(said, unchanged, same(good, end) and good_metrics == metrics) for said, unchanged, end, metrics in ends]


@functools.cache
def outcomes(name):
    """The findings of each rank, by kind of fault."""
    case = next(case for case in CASES if case.name == name)
    faults = [(_nan_token_in_the_loss, replica) for at, replica, _ in LOSSES if at is case]
    faults += [(_nan_in_a_gradient, rank, DOWN.format(layer)) for at, rank, layer in GRADIENTS if at is case]
    faults += [(_infinite_weight, rank, DOWN.format(layer)) for at, rank, layer in WEIGHTS if at is case]
    ranks = run_ranks(_good_bad_good, case.ranks, case, faults)
    return {plant: [found[i] for found in ranks] for i, (plant, *_) in enumerate(faults)}


def check(case, plant, *fragments):
    for said, unchanged, as_if_never in outcomes(case.name)[plant]:
        assert unchanged and as_if_never
        assert len(said) == 1 and all(fragment in said[0] for fragment in ("skipped in a row 1 of 5", *fragments)), said


def of_usual_layouts(faults: list) -> list:
    """Faults, of which the default suite has those on virtual stages and on sharded replicas."""
    return usual(faults, *(i for i, fault in enumerate(faults) if fault[0] in (CASES[3], CASES[5])))


@pytest.mark.parametrize(("case", "replica", "rank"), of_usual_layouts(LOSSES), ids=str)
def test_a_nan_in_one_replicas_loss_changes_nothing_anywhere(case, replica, rank):
    check(case, _nan_token_in_the_loss, f"on rank {rank}; loss nan")


@pytest.mark.parametrize(("case", "rank", "layer"), of_usual_layouts(GRADIENTS), ids=str)
def test_a_nan_in_one_ranks_gradient_is_named(case, rank, layer):
    check(case, _nan_in_a_gradient, f"NaN or infinity in the gradient of {DOWN.format(layer)} on rank {rank}; loss -0.")


@pytest.mark.parametrize(("case", "rank", "layer"), of_usual_layouts(WEIGHTS), ids=str)
def test_an_infinite_weight_is_named_and_not_the_gradients_it_spoils(case, rank, layer):
    check(case, _infinite_weight, f"NaN or infinity in the weight of {DOWN.format(layer)} on rank {rank}; loss nan")


def _bad_loss_alone(case):
    training = Training(case, init_layout(case.config().parallel))
    training.learning.loss_fn = lambda inputs: dataclasses.replace(
        output := training.loss(inputs), numerator=output.numerator + torch.tensor(math.inf)
    )
    training.step()
    return training.said.lines


def test_a_bad_loss_with_good_gradients_is_skipped_too():
    assert "in the loss, not in a gradient; loss inf" in run_ranks(_bad_loss_alone, 1, CASES[0])[0][0]


def _bad_step_after_step(case):
    training = Training(case, init_layout(case.config().parallel))
    _nan_token_in_the_loss(training, 1)
    for _ in range(4):
        training.step()
        training.alarms.stop_if_skipping()
    training.step()
    with pytest.raises(BrokenTraining, match=r"train\.max_skipped_steps: 5 optimizer steps in a row had NaN"):
        training.alarms.stop_if_skipping()


def test_training_stops_on_every_rank_after_too_many_in_a_row():
    run_ranks(_bad_step_after_step, 2, CASES[4])
