"""Images in the policy: log-probs against transformers' whole model, and gradients over layouts."""

import tempfile
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_run
from tiny_vision import QUESTIONS, full_logits, image, write_model

from megagrpo.data.images import ImageReader
from megagrpo.data.packing import PackingRules, pack
from megagrpo.data.tokenizer import load_tokenizer
from megagrpo.models.bridge.load import load_hf
from megagrpo.models.bridge.tower import load_tower
from megagrpo.models.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import TrainSample


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), num_hidden_layers=4)
        yield Path(name)


def samples_of(folder: Path) -> list[TrainSample]:
    """Two responses to each question."""
    hf_config, tokenizer = load_hf_config(folder), load_tokenizer(folder)
    reader = ImageReader(folder, hf_config.vision.image_token, hf_config.vision.merge)
    samples, generator = [], torch.Generator().manual_seed(3)
    for number, (text, sizes) in enumerate(QUESTIONS):
        pictures = [image(*size, seed) for seed, size in enumerate(sizes, 10 * number)]
        messages, found = reader.question([dict(role="user", content=text)], {"images": pictures})
        ids, inputs = tokenizer.render(messages), {}
        if found:
            ids, inputs = reader.placed(ids, found)
        for _ in range(2):
            response = torch.randint(0, 40, (int(torch.randint(3, 9, (), generator=generator)),), generator=generator)
            tokens = torch.cat([torch.tensor(ids), response])
            mask = torch.arange(len(tokens)) >= len(ids)
            logprobs, advantage = torch.zeros(len(tokens)), float(torch.randn((), generator=generator))
            samples.append(TrainSample(tokens, mask, logprobs, advantage, len(samples), inputs=inputs))
    return samples


def rows_of(folder: Path, parallel: dict, share: bool, run: dict) -> tuple:
    """Log-probs [T] of the micro-batches' labels on the last stage, and the packing."""
    config = tiny_run(parallel, data=dict(train=dict(source="none"), images=True), algorithm=dict(beta=0), **run)
    config = config.model_copy(update=dict(rollout=config.rollout.model_copy(update=dict(temperature=1.0))))
    layout, hf_config = init_layout(config.parallel), load_hf_config(folder)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    load_tower(policy, folder)
    policy.weights_changed()
    rules = PackingRules(max_tokens=200, at_least=config.parallel.pp, align=config.parallel.tp, share_prompts=share)
    batch = pack(samples_of(folder), rules, layout.dp_rank, layout.dp_size)
    rows = policy.logprobs(batch)
    layout.close()
    return [None if row is None else row.numpy() for row in rows], batch


def largest_difference(folder: Path, parallel: dict, ranks: int, share: bool = False, **run) -> float:
    samples = samples_of(folder)
    logits = full_logits(folder, [(s.token_ids.tolist(), s.inputs) for s in samples])
    expected = [
        one[:-1].log_softmax(-1).gather(1, s.token_ids[1:, None])[:, 0] for one, s in zip(logits, samples, strict=True)
    ]
    worst, seen = 0.0, set()
    for rows, batch in run_ranks(rows_of, ranks, folder, parallel, share, run):
        for row, m in zip(rows, batch.micro_batches, strict=True):
            for at in m.loss_mask.nonzero()[:, 0].tolist() if row is not None else []:
                sample, place = int(m.samples[m.sequence_index[at]]), int(m.position_ids[at])
                worst = max(worst, abs(float(row[at]) - float(expected[sample][place])))
                seen.add((sample, place))
    assert len(seen) == sum(int(s.response_mask.sum()) for s in samples)
    return worst


@pytest.mark.parametrize("share", [False, True])
def test_logprobs_of_packed_samples_with_images_equal_transformers(folder, share):
    assert largest_difference(folder, {}, 1, share) < 1e-5
