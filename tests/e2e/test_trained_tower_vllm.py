"""A trained vision tower in a real vLLM: syncs fill it, and no output of an older tower is used again."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_trained_tower import batch_of, policy_of
from tiny_vision import is_text, write_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.engine.client import VllmEngine
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings, transport_class
from megagrpo.types import SamplingParams
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.hf_export import save_hf
from tests.e2e.test_images_vllm import prompts_of, theirs
from tests.e2e.tiny_servers import connect, launch

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
STEP = dict(learning_rate=0.01, weight_decay=0.1)


def push(engine: VllmEngine, folder: Path, version: int, sizes: dict, out: Path | None, transport: str) -> int:
    """Push the model in `folder`; with `out` take an optimizer step first, and export the model to it. Returns the
    bytes that the server read."""
    policy = policy_of(folder, sizes, train=STEP)
    if out is not None:
        batch = batch_of(policy, folder)
        policy.train_step(batch, make_loss(policy.config.algorithm), batch.num_tokens)
        save_hf(policy.chunks, policy.hf_config, policy.layout, out, folder)
    way = transport_class(transport)(policy.layout, "float32", TransportSettings(seconds=60, megabytes=0.05))
    with WeightSync(engine if policy.layout.world_rank == 0 else None, policy.layout, "float32", way) as sync:
        read = sync.push(blocks(policy.chunks, policy.hf_config, policy.layout), version).bytes_read
    policy.layout.close()
    return read


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_syncs_fill_the_tower_and_vllm_drops_its_outputs(kind, tmp_path):
    folder, stepped, other = tmp_path / "model", tmp_path / "stepped", tmp_path / "other"
    write_model(folder, kind=kind, num_hidden_layers=4)
    prompts = prompts_of(folder)

    def answers(engine: VllmEngine) -> list[tuple]:
        groups = engine.generate(prompts, 1, SamplingParams(1.0, 12), seed=0)
        return [(r.response_ids.tolist(), r.rollout_logprobs.tolist()) for group in groups for r in group]

    def pushed(engine: VllmEngine, *arguments) -> int:
        read = run_ranks(push, 2, engine, arguments[0], engine.weight_version + 1, *arguments[1:])[0]
        engine.weight_version += 1  # the ranks are forks and have their own client
        return read

    running = connect(launch(folder, f"tower_{kind}", images=True, finds_text=True), folder, towers="trained")
    try:
        first = answers(running.engine)
        pushed(running.engine, folder, dict(tp=2, sequence_parallel=True), stepped, "shared_memory")
        tensors = load_file(stepped / "model.safetensors")
        after_step = answers(running.engine)
        shutil.copytree(stepped, other)
        tensors = {name: tensor if is_text(name) else 0.8 * tensor for name, tensor in tensors.items()}
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        read = pushed(running.engine, other, {}, None, "shared_memory")
        assert read == sum(tensor.nbytes for tensor in tensors.values()), "each byte is read once"
        with_other_tower = answers(running.engine)
        pushed(running.engine, folder, dict(tp=2), None, "p2p")
        assert answers(running.engine) == first  # to the last bit
    finally:
        running.launcher.stop()
    before = load_file(folder / "model.safetensors")
    assert not any(torch.equal(before[name], tensor) for name, tensor in tensors.items())
    for found, model in ((after_step, stepped), (with_other_tower, other)):
        expected = theirs(model, prompts, found)
        worst = max((torch.tensor(a[1]) - b).abs().max().item() for a, b in zip(found, expected, strict=True))
        print(f"{kind}: log-probs differ by {worst:.1e}")
        assert worst < 1e-4
    assert first != after_step != with_other_tower
