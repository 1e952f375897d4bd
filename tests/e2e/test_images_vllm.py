"""Images in a real vLLM: log-probs as transformers computes them, and updates that leave the tower as it was loaded."""

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_vision import KINDS, QUESTIONS, full_logits, image, is_text, write_model

from megagrpo.config import ParallelSection
from megagrpo.data.images import ImageReader
from megagrpo.data.tokenizer import load_tokenizer
from megagrpo.models.bridge.hf_export import save_hf
from megagrpo.models.bridge.load import load_hf
from megagrpo.models.bridge.parameter_blocks import blocks
from megagrpo.models.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer_config import ModelOptions
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.types import Prompt, SamplingParams
from tests.e2e.tiny_servers import connect, launch

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
]


def prompts_of(folder) -> list[Prompt]:
    hf_config, tokenizer = load_hf_config(folder), load_tokenizer(folder)
    reader, prompts = ImageReader(folder, hf_config.vision.image_token, hf_config.vision.merge), []
    for number, (text, sizes) in enumerate(QUESTIONS):
        pictures = [image(*size, seed) for seed, size in enumerate(sizes, 10 * number)]
        messages, found = reader.question([dict(role="user", content=text)], {"images": pictures})
        ids, inputs = reader.placed(tokenizer.render(messages), found) if found else (tokenizer.render(messages), {})
        prompts.append(Prompt(number, ids, messages, inputs=inputs))
    return prompts


def push(engine, folder, version: int, sizes: dict, out) -> int:
    """Load `folder` into shards, push them, and export them to `out`, unless None; return the bytes that were read."""
    layout, hf_config = init_layout(ParallelSection(**sizes)), load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False))
    load_hf(chunks, hf_config, folder, layout)
    if out is not None:
        save_hf(chunks, hf_config, layout, out, folder)
    with WeightSync(engine if layout.world_rank == 0 else None, layout, "float32") as sync:
        read = sync.push(blocks(chunks, hf_config, layout), version).bytes_read
    layout.close()
    return read


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_sees_the_images_and_updates_leave_its_tower(kind, tmp_path):
    folder, spoiled = tmp_path / "model", tmp_path / "spoiled"
    write_model(folder, kind=kind)
    write_model(spoiled, kind=kind)
    tensors = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if is_text(name)}
    changed = {name: 0.9 * tensor for name, tensor in tensors.items()}  # the tower's too: a sync must not send it
    save_file(changed, spoiled / "model.safetensors", metadata={"format": "pt"})
    prompts = prompts_of(folder)
    running = connect(launch(folder, f"images_{kind}", images=True, finds_text=True), folder)
    engine = running.engine

    def answers() -> list[tuple]:
        groups = engine.generate(prompts, 2, SamplingParams(1.0, 12), seed=0)
        return [(r.response_ids.tolist(), r.rollout_logprobs.tolist()) for group in groups for r in group]

    def pushed(source, ranks: int, sizes: dict, out=None) -> int:
        read = run_ranks(push, ranks, engine, source, engine.weight_version + 1, sizes, out)[0]
        engine.weight_version += 1  # the ranks are forks and have their own client
        return read

    try:
        fresh = answers()
        pushed(spoiled, 1, {})
        assert answers() != fresh
        size = sum(tensor.nbytes for tensor in text.values())
        assert pushed(folder, 2, dict(tp=2), tmp_path / "export") == size, (
            "each byte of the language model is read once"
        )
        assert answers() == fresh  # to the last bit
    finally:
        running.launcher.stop()
    samples = [
        ([*prompt.token_ids, *ids], prompt.inputs)
        for prompt, (ids, _) in zip([p for p in prompts for _ in range(2)], fresh, strict=True)
    ]
    (logits,) = run_ranks(full_logits, 1, folder, samples)
    for (ids, logprobs), one in zip(fresh, logits, strict=True):
        expected = one[-len(ids) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == tensors.keys() and all(torch.equal(exported[name], tensors[name]) for name in tensors)
