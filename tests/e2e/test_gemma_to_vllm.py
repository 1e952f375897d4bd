"""Gemma's attention windows, logit caps and norms in vLLM: after a sync from Megatron's shards its log-probs are
Megatron's."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.types import SamplingParams
from megagrpo.weights.bridge.load import load_hf
from tests.e2e.test_megatron_to_vllm import push_from_megatron
from tests.e2e.tiny_servers import PROMPTS, connect, launch, model_folder

pytestmark = pytest.mark.full


def megatron_logprobs(folder: Path, sequences: list[tuple[int, ...]]) -> list:
    """[L - 1] of each sequence's tokens after the first."""
    layout = init_layout(ParallelSection())
    hf_config = load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32))
    load_hf(chunks, hf_config, folder, layout)
    found = []
    for sequence in sequences:
        ids, borders = torch.tensor(sequence), torch.tensor([0, len(sequence)]).int()
        with torch.no_grad():
            logits = chunks[0](ids[None], torch.arange(len(ids))[None], None, packed_seq_params=pack_params(borders))
        found.append(logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy())
    layout.close()
    return found


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_vllms_logprobs_after_a_sync_are_megatrons(kind, tmp_path):
    folder, other = model_folder(kind, 0), model_folder(kind, 1)
    running = connect(launch(folder, kind), folder)
    engine = running.engine
    run_ranks(push_from_megatron, 2, dict(tp=2), engine, other, tmp_path / "out", engine.weight_version + 1)
    engine.weight_version += 1  # the ranks are forks and have their own client
    rollouts = [group[0] for group in engine.generate(PROMPTS, 1, SamplingParams(1.0, 24), seed=0)]
    sequences = [rollout.prompt.token_ids + tuple(rollout.response_ids.tolist()) for rollout in rollouts]
    (expected,) = run_ranks(megatron_logprobs, 1, other, sequences)
    for rollout, whole in zip(rollouts, expected, strict=True):
        own = torch.from_numpy(whole[len(rollout.prompt.token_ids) - 1 :])
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), own, atol=2e-5, rtol=0)
    assert max(len(sequence) for sequence in sequences) > 4 * 6  # windows
    running.launcher.stop()
