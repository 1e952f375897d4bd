"""Adapters of experts against PEFT's, which are those of transformers' stacked parameters (`target_parameters`)."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from suites import usual
from test_build_and_bridge import run_tool
from test_lora_peft import _read_with_peft, _step, assert_resumes, make_with_peft
from test_lora_sync import _push
from tiny_families import MODELS

from megagrpo.proof.verify.verified_step import relative_error
from tests.family_examples import TINY_EXPERTS

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
QWEN = dict(TINY_EXPERTS, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, head_dim=8)
OSS = {key: value for key, value in MODELS["gpt_oss"][1].items() if key != "head_dim"} | dict(pad_token_id=0)
V3 = MODELS["deepseek_v3"][1]
V2 = {key: value for key, value in MODELS["deepseek_v2 lite"][1].items() if key != "rms_norm_eps"}
LATENT_NAMES = [
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]
# family, the model's shape, the adapters
CASES = {
    "qwen3_moe": ("Qwen3Moe", QWEN, dict(target_modules=["q_proj", "o_proj"], target_parameters=BOTH)),
    "down alone": ("Qwen3Moe", QWEN, dict(target_modules=[], target_parameters=["layers.2.mlp.experts.down_proj"])),
    # the width of gate and up together is the hidden size, so that no shape tells the two matrices apart
    "narrow": ("Qwen3Moe", QWEN | dict(moe_intermediate_size=24), dict(target_modules=[], target_parameters=BOTH)),
    "mixtral": (
        "Mixtral",
        dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        dict(target_modules=["v_proj"], target_parameters=BOTH),
    ),
    "deepseek_v3": ("DeepseekV3", V3, dict(target_modules=LATENT_NAMES, target_parameters=BOTH)),
    "deepseek_v2": ("DeepseekV2", V2, dict(target_modules=["q_proj", "kv_a_proj_with_mqa", "up_proj"])),
    "gpt_oss": ("GptOss", OSS, dict(target_modules=["k_proj"], target_parameters=BOTH)),
}
LAYOUTS = [
    {},
    dict(ep=2),
    dict(tp=2, etp=2, sequence_parallel=True),
    dict(tp=2, ep=2, etp=1, sequence_parallel=True),
    dict(pp=2),
]


@pytest.fixture(scope="module", params=usual(CASES, 0))
def case(request, tmp_path_factory):
    import peft  # noqa: F401 - once here, not in every fork

    kind, shape, selection = CASES[request.param]
    root = tmp_path_factory.mktemp("experts")
    made = run_ranks(partial(make_with_peft, **selection), 1, root, kind, shape, 0.05)[0]
    return root, selection, *made


@pytest.mark.parametrize("parallel", usual(LAYOUTS, 3), ids=str)
def test_gradients_merged_weights_and_files_are_those_of_peft(parallel, case, tmp_path):
    root, selection, gradients, expected, _ = case
    ranks = max(parallel.get("tp", 1) * parallel.get("pp", 1), parallel.get("ep", 1))
    ours, merged, *_ = run_ranks(_step, ranks, root, parallel, tmp_path / "out", selection)[0]
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(ours[name].reshape(gradient.shape), gradient) < 2e-5, name
    assert merged.keys() == expected.keys()
    assert max(relative_error(merged[name], tensor) for name, tensor in expected.items()) < 1e-6
    written, read = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", root / "adapter"))
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in read)


@pytest.mark.parametrize("case", usual(CASES, 6), indirect=True)
@pytest.mark.parametrize("parallel", [dict(tp=2, ep=2, etp=1, sequence_parallel=True)], ids=str)
def test_peft_reads_what_we_write_and_computes_the_same(parallel, case, tmp_path):
    root, selection, *_, logits = case
    run_ranks(_step, 2, root, parallel, tmp_path / "out", selection)
    assert torch.equal(run_ranks(_read_with_peft, 1, root, tmp_path / "out", True)[0], logits)
    saved, theirs = (
        json.loads((at / "adapter_config.json").read_text()) for at in (tmp_path / "out", root / "adapter")
    )
    for key in ("target_modules", "target_parameters"):
        assert {*saved.get(key, [])} == {*(theirs[key] or [])}


@pytest.mark.full
@pytest.mark.parametrize("case", usual(CASES, 0), indirect=True)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    usual([(dict(ep=2), dict(tp=2, etp=2, sequence_parallel=True)), (dict(pp=2), dict(ep=2))], 0),
    ids=str,
)
def test_a_run_continues_in_another_layout(saved, loaded, case, tmp_path):
    assert_resumes(case[0], saved, loaded, tmp_path, case[1])


@pytest.mark.parametrize("case", usual(CASES, 0), indirect=True)
def test_the_engine_gets_the_weights_of_a_merge_which_are_those_of_peft(case, tmp_path):
    root, selection, _, expected, _ = case
    parallel = dict(tp=2, ep=2, etp=1, sequence_parallel=True)
    synced = run_ranks(_push, 2, root, parallel, tmp_path / "shm", tmp_path / "export", selection)[0]
    arguments = (run_tool, 2, "merge", root / "adapter", tmp_path / "merged", "--model", root / "model", "--ep", 2)
    assert run_ranks(*arguments) == [0, 0]
    exported, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "merged"))
    assert synced.keys() == exported.keys() == merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.equal(exported[name], tensor.bfloat16()), name
        assert torch.equal(torch.from_numpy(synced[name]), exported[name].float()), name
        assert relative_error(tensor, expected[name]) < 1e-6, name


def _in_vllm(root, architecture: str) -> dict[str, torch.Tensor]:
    """Each expert's (w1, w2, w3) change of the weights as vLLM's own code reads the adapter: no server, no kernel."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(json.loads((root / "adapter/adapter_config.json").read_text()))
    tensors = load_file(root / "adapter/adapter_model.safetensors")
    model = LoRAModel.from_lora_tensors(1, tensors, helper, device="cpu")
    manager = LoRAModelManager.__new__(LoRAModelManager)
    manager.is_pooling_model = False
    manager.model = SimpleNamespace(config=SimpleNamespace(architectures=[architecture]))
    experts, changes = SimpleNamespace(local_num_experts=4, global_num_experts=4, ep_rank=0), {}
    for name in [name for name in model.loras if name.endswith(".mlp.experts")]:
        manager._convert_3d_to_2d_moe_lora(model, experts, name)
        held = model.loras[name]
        for expert in range(4):
            for part, a, b in zip(("w1", "w2", "w3"), held.lora_a, held.lora_b, strict=True):
                changes[f"{name}.{expert}.{part}"] = held.scaling * b[expert] @ a[expert]
    return changes


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"], indirect=True)
def test_vllm_reads_the_same_adapters_from_these_files(case):
    root, _, _, merged, _ = case
    gpt_oss, base = "gate_up_proj" in "".join(merged), load_file(root / "model/model.safetensors")
    ((found),) = run_ranks(_in_vllm, 1, root, "GptOssForCausalLM" if gpt_oss else "Qwen3MoeForCausalLM")
    assert len(found) == 4 * 4 * 3
    for name, change in found.items():
        experts, expert, part = name.rsplit(".", 2)
        if gpt_oss:
            fused = f"{experts}.down_proj" if part == "w2" else f"{experts}.gate_up_proj"
            both = (merged[fused] - base[fused])[int(expert)].T
            expected = {"w1": both[::2], "w2": both, "w3": both[1::2]}[part]
        else:
            of_expert = f"{experts}.{expert}.{dict(w1='gate_proj', w2='down_proj', w3='up_proj')[part]}.weight"
            expected = merged[of_expert] - base[of_expert]
        assert relative_error(change.double(), expected.double()) < 1e-5, name
