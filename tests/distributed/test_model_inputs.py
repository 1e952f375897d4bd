"""Inputs beside token ids, which no policy reads today."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.verify.verified_step import prepare


def pass_with_inputs(at: int) -> str:
    config = tiny_run({})
    policy, batch, _ = prepare(config, tiny_model("qwen2_untied"), init_layout(config.parallel), few_samples())
    micro_batches = list(batch.micro_batches)
    micro_batches[at] = replace(micro_batches[at], inputs=({}, dict(pixels=torch.ones(2))))
    with pytest.raises(ValueError) as error:
        policy.logprobs(replace(batch, micro_batches=tuple(micro_batches)))
    return str(error.value)


def test_the_policy_rejects_a_prompt_with_inputs():
    assert run_ranks(pass_with_inputs, 1, -1) == [
        "Prompt.inputs: the policy reads token ids only, and a prompt has pixels"
    ]
