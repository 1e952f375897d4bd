"""Another model as the reference of adapters: its log-probs are those of a policy with its weights, in every layout."""

from pathlib import Path

import pytest
import torch
import transformers
from ranks import run_ranks
from tiny_policy import few_samples, tiny_run

from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.process.progress_hook import SILENT
from megagrpo.proof.verify.shrink import VOCABULARY
from megagrpo.trainer.gpu.state_offload import Offload
from megagrpo.trainer.policy_update import load_policy
from megagrpo.trainer.run_inputs import ModelFiles
from megagrpo.types import SamplingParams

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Two models of each kind."""
    folder = tmp_path_factory.mktemp("models")
    run_ranks(_make_models, 1, folder)
    return folder


def _make_models(folder: Path) -> None:
    sizes = dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    sizes |= dict(num_hidden_layers=4, vocab_size=VOCABULARY, initializer_range=0.1, max_position_embeddings=64)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0, 1])
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        for kind, config in (
            ("tied", transformers.LlamaConfig(**sizes, tie_word_embeddings=True)),
            ("experts", transformers.Qwen3MoeConfig(**sizes, **experts)),
        ):
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name / kind)


def _scored(parallel: dict, models: Path, kind: str, storage: str, adapted: bool) -> dict:
    """Log-probs of each sample on the last stage: of the reference of adapters, before and after a round trip to the
    host, or of a policy on the reference's weights, with the same storage."""
    kinds = dict(target_parameters=EXPERTS) if kind == "experts" else {}
    own = models / ("policy" if adapted else "reference") / kind
    sections = dict(algorithm=dict(beta=0.1), lora=dict(rank=4) | kinds, model=dict(base_storage=storage))
    config: RunConfig = tiny_run(parallel, **sections)
    layout, hf_config = init_layout(config.parallel), load_hf_config(own)
    other = models / "reference" / kind if adapted else None
    files = ModelFiles(own, hf_config, torch.float32, other, [])
    policy, reference = load_policy(config, layout, files, SamplingParams(1.0, 8), SILENT)
    rules = packing_rules(config, policy.shares_prompts)
    batch = pack(few_samples(), rules, layout.dp_rank, layout.dp_size)
    if adapted:
        before = policy.logprobs(batch)
        found = reference.logprobs(batch)
        offload = Offload(policy, reference)
        offload.offload_all()
        offload.load_all()
        pairs = [(policy.logprobs(batch), before), (reference.logprobs(batch), found)]
        assert all(a is None or torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
        assert all(a is None or not torch.equal(a, b) for a, b in zip(before, found, strict=True))
    else:
        found = policy.logprobs(batch)
    held = {}
    for micro_batch, values in zip(batch.micro_batches, found, strict=True):
        for index, sample in enumerate(micro_batch.samples.tolist()):
            if values is not None and sample >= 0:  # -1: padding
                held[sample] = values[(micro_batch.sequence_index == index) & micro_batch.loss_mask].numpy().copy()
    layout.close()
    return held


@pytest.mark.parametrize(
    ("kind", "parallel", "ranks", "storage"),
    [
        pytest.param("tied", {}, 1, "none", marks=pytest.mark.full),
        ("tied", dict(pp=2, tp=2), 4, "none"),
        pytest.param("experts", dict(ep=2), 2, "none", marks=pytest.mark.full),
        pytest.param("experts", dict(tp=2, etp=1, sequence_parallel=True), 2, "fp8", marks=pytest.mark.full),
        pytest.param("tied", dict(pp=2, vpp=2), 2, "fp8", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_reference_scores_as_a_policy_with_its_weights(kind, parallel, ranks, storage, models):
    expected = run_ranks(_scored, 1, {}, models, kind, storage, False)[0]
    found = {}
    for of_rank in run_ranks(_scored, ranks, parallel, models, kind, storage, True):
        found |= of_rank
    assert found.keys() == expected.keys() and len(found) > 1
    for sample, values in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[sample]), torch.from_numpy(values), atol=1e-5, rtol=1e-5)
