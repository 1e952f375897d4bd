"""What teachers read of a micro-batch: some of its samples, maybe after other prompts (`Prompt.teachers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megagrpo.data.packing.sample_packing import PackingRules, PackPlan, SampleShapes, build_micro_batch
from megagrpo.train_types import MicroBatch, Reading, TrainBatch, TrainSample


def with_teachers(sample: TrainSample, teachers: Mapping[str, Sequence[int] | None], response: int) -> TrainSample:
    """Return the sample with what teachers read: its last `response` tokens after the prompts of `teachers`."""
    start = sample.token_ids.numel() - response

    def reading(prompt: Sequence[int] | None) -> TrainSample | None:
        if not prompt:
            return None if prompt is None else sample
        zeros = torch.zeros(len(prompt))
        return replace(
            sample,
            token_ids=torch.cat((torch.tensor(prompt), sample.token_ids[start:])),
            response_mask=torch.cat((zeros.bool(), sample.response_mask[start:])),
            rollout_logprobs=torch.cat((zeros, sample.rollout_logprobs[start:])),
        )

    return replace(sample, readings={name: reading(prompt) for name, prompt in teachers.items()})


def with_readings(
    batch: TrainBatch, plan: PackPlan, dp_rank: int, samples: Mapping[int, TrainSample], rules: PackingRules
) -> TrainBatch:
    """Return the batch that `build_batch` makes of the samples, with what teachers read of each micro-batch."""
    pairs = zip(batch.micro_batches, plan.of_rank(dp_rank), strict=True)
    return replace(batch, micro_batches=tuple(_with_readings(m, i, plan, samples, rules) for m, i in pairs))


def _with_readings(
    m: MicroBatch, indices: np.ndarray, plan: PackPlan, samples: Mapping[int, TrainSample], rules: PackingRules
) -> MicroBatch:
    members = {i: samples[i].readings for i in indices.tolist()}
    readings = dict[str, Reading]()
    for name in next(iter(members.values()), None) or ():
        read = {i: one for i, of in members.items() if of and (one := of[name]) is not None}
        plain = [replace(one, readings=None, trajectory=None) for one in read.values()]
        shapes, keys = SampleShapes.of(plain, rules), plan.shapes.prompt_keys[[*read]]
        both = np.stack((keys, shapes.prompt_keys), axis=1)  # samples share a prompt if they share both prompts
        shapes = replace(shapes, prompt_keys=np.unique(both, axis=0, return_inverse=True)[1].reshape(-1))
        taught = torch.isin(m.samples, torch.tensor([one.index for one in plain]))[m.sequence_index]
        readings[name] = Reading(build_micro_batch(plain, rules, shapes), m.loss_mask & taught)
    return replace(m, readings=readings)
