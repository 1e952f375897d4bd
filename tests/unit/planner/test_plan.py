import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.config import LoraSection, ParallelSection, load_config
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import load_hf_config, parse_hf_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner import Plan, plan
from megagrpo.planner.costs.engine_memory import PREFILL_TOKENS, ServerMemory, kv_elements
from megagrpo.planner.costs.planned_memory import (
    activation_elements,
    host_memory,
    run_memory,
    stage_memory,
    trainer_memory,
)
from megagrpo.planner.costs.shapes import (
    layer_parameters,
    layers_of_ranks,
    num_active_parameters,
    num_parameters,
    stage_adapters,
    stage_expert_adapters,
    stage_experts,
    stage_linears,
    stage_parameters,
)
from megagrpo.planner.rules.vllm_problems import vllm_can_split
from tests.family_examples import OTHERS, RELEASES
from tests.unit.for_each import for_each

REPOSITORY = Path(__file__).parents[3]
CONFIGS = {  # ranks, and GiB of a GPU; test_submit.py tests the configs for clusters
    "quickstart": (1, 79),
    "quickstart_sft": (1, 79),
    "quickstart_tp3": (3, 79),
    "quickstart_pp2": (2, 79),
    "quickstart_cp2": (2, 79),
    "quickstart_2nodes": (2, 79),
}
LLAMA = dict(
    model_type="llama", hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
) | dict(intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
MIXED = LLAMA | dict(
    model_type="qwen3_moe", head_dim=64, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=192
)
GPT_OSS = LLAMA | dict(
    model_type="gpt_oss", head_dim=64, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
)
GPT_OSS |= {
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK_V3 = LLAMA | {  # the sizes of the release with fewer layers
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "tie_word_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


@pytest.fixture
def folder(tmp_path):
    """A model folder of SmolLM2's shape, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def told(made: Plan) -> list[str]:
    """The plan's problems as printed."""
    return list(map(str, made.problems))


def config(folder: Path, *overrides: str):
    return load_config(REPOSITORY / "configs" / "quickstart.yaml", [f"model.path={folder}", *overrides])


@pytest.mark.parametrize("name", CONFIGS)
def test_committed_configs_have_a_plan_without_problems(name):
    ranks, gpu = CONFIGS[name]
    made = plan(load_config(REPOSITORY / "configs" / f"{name}.yaml"), ranks, gpu_memory_gb=gpu)
    assert told(made) == [] and all(0 < parts["total"] < gpu for parts in made.memory.values())
    assert ("vLLM server" in str(made)) == ("generate" in made.memory) == (name != "quickstart_sft")


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA,
        LLAMA | {"tie_word_embeddings": False, "vocab_size": 101},
        LLAMA | {"model_type": "qwen2", "num_hidden_layers": 4},
        LLAMA | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
        LLAMA | {"model_type": "phi3", "rms_norm_eps": 1e-5, "pad_token_id": 0},
        LLAMA | {"model_type": "glm", "head_dim": 32, "rms_norm_eps": 1e-5, "pad_token_id": 0},
        LLAMA | {"model_type": "glm4", "head_dim": 32, "rms_norm_eps": 1e-5, "pad_token_id": 0},
        MIXED | {"mlp_only_layers": [3, 7]},
        MIXTRAL | {"tie_word_embeddings": False},
        DEEPSEEK_V3,
        DEEPSEEK_V3
        | {
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy",
        },
        LLAMA | {"model_type": "gemma2", "head_dim": 32},
        LLAMA | {"model_type": "gemma3_text", "head_dim": 32},
        GPT_OSS,
        MIXED
        | {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 6, "head_dim": 24}
        | {"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4}
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1, 3], "tie_word_embeddings": False},
    ],
)
def test_parameters_are_counted_as_transformers_does(raw):
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    assert num_parameters(parse_hf_config(raw)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("raw", [pytest.param(raw, id=name) for name, raw in (RELEASES | OTHERS).items()])
def test_so_are_those_of_a_release(raw):
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert num_parameters(parse_hf_config(raw)) == sum(parameter.numel() for parameter in trained)


@pytest.mark.parametrize("kind", [kind for kind in RELEASES if FAMILIES[kind].unserved])
def test_a_family_that_no_vllm_serves_is_refused_unless_servers_run_elsewhere(kind, folder):
    (folder / "config.json").write_text(json.dumps(RELEASES[kind] | dict(num_hidden_layers=4)))
    told_of_model = [problem for problem in told(plan(config(folder), 1)) if problem.startswith("model.path")]
    reason = f"{kind} cannot be trained: {FAMILIES[kind].unserved}; its models can be converted, exported and verified"
    assert told_of_model == [f"model.path: {reason}"]
    urls = config(folder, "rollout.urls=[http://127.0.0.1:1]")
    assert not [problem for problem in told(plan(urls, 1)) if problem.startswith("model.path")]


@pytest.mark.parametrize(("kind", "part"), [("qwen3_next", "gated attention"), ("granitemoehybrid", "Mamba-2")])
@pytest.mark.parametrize(
    ("key", "value"), [("lora.sync", "adapter"), ("model.base_storage", "nf4"), ("train.optimizer", "muon")]
)
def test_what_recurrent_models_do_not_support_is_refused(kind, part, key, value, folder):
    (folder / "config.json").write_text(json.dumps(RELEASES[kind]))
    extra = ["lora.rank=4"] if key in ("lora.sync", "model.base_storage") else []
    found = told(plan(config(folder, f"{key}={value}", *extra), 1))
    assert [text for text in found if text.startswith(f"{key}: {kind} has {part}")]


@for_each(
    ("kind", "layout", "reason"),
    [
        ("qwen3_next", ["tp=3"], "num_key_value_heads=2 is not divisible by tp=3; valid tp: 1, 2, 4, 8, 16"),
        ("qwen3_next", ["tp=2", "cp=16"], "linear_num_key_heads=16 is not divisible by tp x cp = 32"),
        ("granitemoehybrid", ["tp=3"], "num_attention_heads=32 is not divisible by tp=3"),
        ("granitemoehybrid", ["cp=3"], "the 64 heads of Mamba-2 are not divisible by tp x cp = 3"),
        ("granitemoehybrid", ["tp=2", "cp=2"], ""),
    ],
)
def test_heads_of_recurrent_layers_are_cut_whole(kind, layout, reason, folder):
    sizes = dict(num_hidden_layers=4) if kind == "qwen3_next" else {}
    (folder / "config.json").write_text(json.dumps(RELEASES[kind] | sizes))
    world = 32 if kind == "qwen3_next" else 12
    found = told(plan(config(folder, *(f"parallel.{size}" for size in layout)), world))
    assert [text for text in found if reason in text] if reason else not found


def test_adapters_of_gated_attention_need_whole_groups_of_heads(folder):
    (folder / "config.json").write_text(json.dumps(RELEASES["qwen3_next"] | dict(num_hidden_layers=4)))
    reason = "4 exceeds the 2 KV heads of qwen3_next, and adapters of gated attention"
    assert [text for text in told(plan(config(folder, "parallel.tp=4", "lora.rank=4"), 32)) if reason in text]


def test_a_server_keeps_states_of_mamba_and_keys_and_values_of_attention():
    model = parse_hf_config(RELEASES["granitemoehybrid"])
    blocks, states = 36, 64 * 64 * 128 + 3 * (64 * 64 + 2 * 128)
    assert kv_elements(model, 1, 7) == blocks * states + 4 * 7 * 2 * 8 * 64


def test_the_ranks_together_hold_the_model_and_what_is_held_twice():
    model = parse_hf_config(LLAMA)
    norms = 576 * (2 * 30 + 1)  # not sharded
    assert 3 * stage_parameters(model, ParallelSection(tp=3))[0] == num_parameters(model) + 2 * norms
    embedding = 49152 * 576
    first, second = stage_parameters(model, ParallelSection(pp=2))
    assert first + second == num_parameters(model) + embedding and second - first == 576


def test_the_ranks_share_out_heads_and_shared_experts_and_each_holds_the_latents_projections():
    model = parse_hf_config(DEEPSEEK_V3)
    latents = 7168 * (1536 + 512 + 64) + 1536 + 512
    whole = 5 * (latents + 2 * 7168) + 2 * 256 * 7168 + 7168  # with norms and routers
    experts = 2 * 256 * 3 * 7168 * 2048
    held = stage_parameters(model, ParallelSection(tp=4, ep=4, etp=1))[0]
    assert 4 * held == num_parameters(model) - experts + 3 * whole
    assert num_parameters(model) - num_active_parameters(model) == experts * 248 // 256
    assert kv_elements(model, 1, 7) == kv_elements(model, 4, 7) == 7 * 5 * 576


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.merged_only])
def test_adapters_that_vllm_would_apply_otherwise_are_merged(kind, folder):
    raw = RELEASES[kind]
    attention = (
        dict(layer_types=["full_attention"] * raw["num_hidden_layers"]) if "mamba" in raw.get("layer_types", ()) else {}
    )
    (folder / "config.json").write_text(json.dumps(raw | attention))
    names = ", ".join(FAMILIES[kind].merged_only)
    assert told(plan(config(folder, "lora.rank=4", "lora.sync=adapter"), 1)) == [
        f"lora.sync: adapter, but vLLM would apply adapters of {names} of {kind} otherwise; choose merged, or leave them "
        "out of lora.target_modules"
    ]
    assert not told(plan(config(folder, "lora.rank=4", "lora.sync=adapter", "lora.target_modules=[o_proj]"), 1))
    assert not told(plan(config(folder, "lora.rank=4"), 1))


def test_what_latent_attention_and_shared_experts_cannot_have_is_told(folder):
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert told(plan(config(folder, "lora.rank=4", "lora.sync=adapter"), 1)) == [
        "lora.sync: adapter, but vLLM folds kv_b_proj of deepseek_v3 into products that apply no adapter; choose merged, "
        "or leave it out of lora.target_modules"
    ]
    assert not told(plan(config(folder, "lora.rank=4", "lora.sync=adapter", "lora.target_modules=[q_b_proj]"), 1))
    made = dict(plan(config(folder, "lora.rank=4"), 1).rows)["LoRA"]
    assert "on q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj: " in made
    sizes = 7168 * 2 + 1536 + 512 + 64 + 1536 + 128 * 192 + 512 + 128 * 256 + 7168 + 128 * 128
    dense, layers, shared = 3 * (7168 + 18432), DEEPSEEK_V3["num_hidden_layers"], 3 * (7168 + 2048)
    first = DEEPSEEK_V3["first_k_dense_replace"]
    assert f"{4 * (layers * sizes + first * dense + (layers - first) * shared):,} trained" in made
    assert told(plan(config(folder, "algorithm.router_aux_loss_coef=0.1"), 1)) == [
        "algorithm.router_aux_loss_coef: 0.1, but the balancing loss needs experts chosen by softmax, without groups, "
        "unlike those of deepseek_v3; set it to 0"
    ]
    (folder / "config.json").write_text(
        json.dumps(DEEPSEEK_V3 | {"moe_intermediate_size": 2052, "num_hidden_layers": 4})
    )
    assert told(plan(config(folder, "parallel.tp=8", "parallel.etp=1", "parallel.sequence_parallel=true"), 8)) == [
        "parallel.tp: moe_intermediate_size x n_shared_experts=2052 is not divisible by tp=8; valid tp: 1, 2, 4"
    ]


@pytest.mark.parametrize(
    ("sizes", "of_experts"), [(dict(), 1), (dict(ep=4), 4), (dict(ep=2, etp=3), 6), (dict(tp=3), 3)]
)
def test_experts_are_shared_out_over_ep_and_etp_and_their_optimizer_over_what_is_left(folder, sizes, of_experts):
    (folder / "config.json").write_text(json.dumps(MIXED | {"mlp_only_layers": [0]}))
    model = parse_hf_config(MIXED | {"mlp_only_layers": [0]})
    experts = 29 * 12 * 3 * 576 * 192
    assert stage_experts(model, ParallelSection(**sizes)) == [experts // of_experts]
    assert num_parameters(model) - num_active_parameters(model) == experts * 9 // 12
    settings = config(
        folder,
        "model.precision=bf16",
        "train.distributed_optimizer=true",
        *(f"parallel.{k}={v}" for k, v in sizes.items()),
    )
    world, dense = 12, stage_parameters(model, ParallelSection(**sizes))[0]
    memory = trainer_memory(settings, model, dp=world // sizes.get("tp", 1))["generate"]
    assert memory["weights"] == pytest.approx(2 * (dense + experts / of_experts) / 2**30)
    assert memory["optimizer"] == pytest.approx(12 * (dense * sizes.get("tp", 1) + experts) / world / 2**30)


def test_what_does_not_fit_the_experts_is_told_with_what_does(folder):
    def problems(raw: dict, world_size: int, *overrides: str) -> list[str]:
        (folder / "config.json").write_text(json.dumps(raw))
        return told(plan(config(folder, *overrides), world_size))

    assert problems(MIXED, 6, "parallel.tp=3", "parallel.ep=2", "parallel.sequence_parallel=true") == []
    assert problems(MIXED, 3, "parallel.tp=3") == [
        "parallel.sequence_parallel: false, but the experts of qwen3_moe need it with parallel.tp=3; set it to true"
    ]
    assert problems(MIXED, 4, "parallel.ep=3") == [
        "world_size: 4 is not a multiple of parallel.ep x parallel.etp x parallel.pp = 3 x 1 x 1 = 3; use 3 or 6 ranks"
    ]
    assert problems(MIXED, 40, "parallel.ep=8", "parallel.etp=5") == [
        "parallel.ep: the model's 12 experts are not divisible by ep=8; valid ep: 1, 2, 3, 4, 6, 12",
        "parallel.etp: the experts' width 192 is not divisible by etp=5; valid etp: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, "
        "48, 64, 96, 192",
    ]
    assert problems(LLAMA, 4, "parallel.ep=2", "parallel.etp=2") == [
        "parallel.ep: 2, but llama has no experts; set it to 1",
        "parallel.etp: 2, but llama has no experts; leave it empty",
    ]
    assert problems(LLAMA, 1, "algorithm.router_aux_loss_coef=0.01") == [
        "algorithm.router_aux_loss_coef: 0.01, but llama has no experts; set it to 0"
    ]
    assert problems(LLAMA, 1, "train.freeze_moe_router=true") == [
        "train.freeze_moe_router: true, but llama has no experts; set it to false"
    ]
    assert problems(MIXED, 1, "algorithm.moe_router_bias_update_rate=0.001") == [
        "algorithm.moe_router_bias_update_rate: 0.001, but the routers of qwen3_moe have no selection bias; set it to 0, "
        "or use algorithm.router_aux_loss_coef"
    ]
    assert problems(LLAMA, 1, "algorithm.moe_router_bias_update_rate=0.001") == [
        "algorithm.moe_router_bias_update_rate: 0.001, but llama has no experts; set it to 0"
    ]
    assert problems(LLAMA, 1, "rollout.routing_replay=engine") == [
        "rollout.routing_replay: engine, but llama has no experts; set it to off"
    ]
    (narrow,) = problems(MIXED | {"moe_intermediate_size": 193}, 1, "rollout.tp=3")
    assert narrow.startswith(
        "rollout.tp: vLLM cannot split 9 heads, 3 KV heads, vocabulary 49152 and intermediate_size=193 over tp=3; "
        "valid tp: 1"
    )


def test_more_ranks_than_kv_heads_are_planned_and_say_what_they_exclude(folder):
    one = LLAMA | dict(num_attention_heads=12, num_key_value_heads=1, head_dim=64)
    (folder / "config.json").write_text(json.dumps(one))
    made = plan(config(folder, "parallel.tp=4"), 4)
    assert told(made) == [] and "12 heads, 1 KV heads" in dict(made.rows)["model"]
    model = load_hf_config(folder)
    kept = [activation_elements(config(folder, f"parallel.tp={tp}"), model, gpu=True)[0] * tp for tp in (1, 4)]
    assert kept[1] > kept[0] + 4 * (12 + 2) * 64  # the gathered queries, keys and values
    muon = ("train.optimizer=muon", "train.distributed_optimizer=false")
    assert told(plan(config(folder, "parallel.tp=4", *muon), 4)) == [
        "parallel.tp: 4 exceeds the 1 KV heads of llama, and muon needs whole groups of heads on a rank; lower it, or "
        "choose adam"
    ]
    fused = one | dict(model_type="phi3", pad_token_id=0, rms_norm_eps=1e-6)
    (folder / "config.json").write_text(json.dumps(fused))
    assert told(plan(config(folder, "parallel.tp=4", "lora.rank=4"), 4))[0] == (
        "parallel.tp: 4 exceeds the 1 KV heads of phi3, and adapters of the fused qkv_proj need whole groups of heads "
        "on a rank; lower it"
    )
    assert told(plan(config(folder, "parallel.tp=4", "lora.rank=4", "lora.target_modules=[o_proj]"), 4)) == []


def test_the_plan_says_where_the_experts_are():
    made = dict(plan(load_config(REPOSITORY / "configs" / "qwen3_30b_a3b_4nodes.yaml"), 16).rows)
    assert "30,532.1M parameters (3,353.0M active)" in made["model"]
    assert made["experts"].endswith("a token; the ranks of a stage = etp 1 x ep 8 x 2 copies, 16 experts on each")


def test_bf16_weights_gradients_and_sharded_optimizer_state_add_up(folder):
    layout = ("model.precision=bf16", "algorithm.beta=0.1")
    made = trainer_memory(config(folder, "train.distributed_optimizer=true", *layout), parse_hf_config(LLAMA), dp=4)[
        "generate"
    ]
    gib = 134_515_008 / 2**30
    assert made == pytest.approx(
        {"weights": 2 * gib, "gradients": 4 * gib, "optimizer": 12 * gib / 4, "reference": 2 * gib}
    )
    whole = trainer_memory(config(folder, "train.distributed_optimizer=false", *layout), parse_hf_config(LLAMA), dp=4)[
        "generate"
    ]
    assert whole["optimizer"] == pytest.approx(12 * gib)


def test_float32_weights_with_moments_in_host_memory_leave_no_optimizer_state_on_the_gpu(folder):
    (stage,) = stage_memory(config(folder, "train.optimizer_offload=true"), parse_hf_config(LLAMA), dp=2)
    assert stage["load"]["optimizer"] == stage["train"]["optimizer"] == 0
    bf16 = config(folder, "train.optimizer_offload=true", "model.precision=bf16", "train.distributed_optimizer=false")
    (stage,) = stage_memory(bf16, parse_hf_config(LLAMA), dp=2)
    masters = 4 * 134_515_008 / 2**30
    assert (stage["load"]["optimizer"], stage["train"]["optimizer"]) == pytest.approx((masters, masters))


def test_a_checkpoint_takes_host_memory_of_the_rank_that_gathers_and_writes_and_a_little_of_the_others(folder):
    """Bytes of a bf16 weight: gathered 12 on the first rank; temporarily 12 and each rank's own three parts; written 2
    + 12."""
    gib, model, keys = (
        134_515_008 / 2**30,
        parse_hf_config(LLAMA),
        ("model.precision=bf16", "train.distributed_optimizer=true"),
    )
    waited, meanwhile = (
        host_memory(config(folder, *keys, f"run.async_save={on}"), model, 16) for on in ("false", "true")
    )
    part = 12 / 16
    none = {"moments": 0, "offload": 0, "activations": 0}
    assert waited == pytest.approx(none | {"saving": (12 + 12 + 8 * part) * gib, "writing": 0})
    assert meanwhile == pytest.approx(none | {"saving": (12 + 14 + 7 * part) * gib, "writing": 14 * gib})
    off = host_memory(config(folder, *keys, "train.optimizer_offload=true"), model, 16)
    assert off["moments"] == pytest.approx(8 * 8 / 16 * gib)
    whole = host_memory(config(folder, "model.precision=bf16", "train.distributed_optimizer=false"), model, 16)
    assert whole["saving"] == pytest.approx(14 * gib)
    experts = stage_experts(parse_hf_config(MIXED), ParallelSection(ep=4))[0]
    others = stage_parameters(parse_hf_config(MIXED), ParallelSection(ep=4))[0]
    shared = host_memory(config(folder, *keys, "parallel.ep=4", "run.async_save=true"), parse_hf_config(MIXED), 8)
    assert shared["writing"] == pytest.approx((4 * experts + others) * 14 / 2**30)
    made = [config(folder, *keys, "algorithm.beta=0.1", f"train.offload={on}") for on in ("true", "false")]
    leaves, stays = (host_memory(one, model, 16, gpu=True)["offload"] for one in made)
    assert (leaves, stays) == pytest.approx((8 * (2 + 12 / 16 + 2) * gib, 0))  # weights, masters and moments, reference
    # and vLLM's weights
    assert run_memory(made[0], model, 16, gpu_memory_gb=80).host["saving"] == pytest.approx(
        waited["saving"] + 8 * 2 * gib
    )
    assert f"{leaves:.1f} GiB, pinned, for state offloaded while" in str(plan(made[0], 16, gpu_memory_gb=80))
    text = str(plan(config(folder, *keys, "run.async_save=true"), 16))
    assert f"{meanwhile['saving']:.1f} GiB of the fullest node's RAM while a checkpoint is assembled" in " ".join(
        text.split()
    )
    assert f"; {meanwhile['writing']:.1f} GiB until it is written" in " ".join(text.split())


def test_virtual_stages_move_into_the_optimizer_one_by_one(folder):
    settings = ("parallel.pp=2", "train.distributed_optimizer=true", "algorithm.beta=0", "model.precision=fp32")
    whole, virtual = (
        trainer_memory(config(folder, *settings, f"parallel.vpp={vpp}"), model, dp=1)["load"]
        for vpp in (1, 2)
        for model in [parse_hf_config(LLAMA | {"num_hidden_layers": 60, "tie_word_embeddings": False})]
    )
    assert virtual["staging"] == pytest.approx(
        (15 * layer_parameters(parse_hf_config(LLAMA), 0) + 49152 * 576) * 4 / 2**30, rel=1e-3
    )
    assert virtual["staging"] < whole["staging"]


def test_recomputation_and_smaller_micro_batches_lower_the_activations(folder):
    def activations(*overrides: str) -> float:
        return trainer_memory(config(folder, *overrides), parse_hf_config(LLAMA), dp=1)["train"]["activations"]

    assert activations("model.recompute=full") < activations() / 5
    whole, half = (activations(f"train.max_tokens_per_micro_batch={tokens}") for tokens in (2048, 1024))
    assert half == pytest.approx(whole / 2)


def test_logits_cost_a_chunk_and_exact_kl_the_hidden_states_of_the_reference(folder):
    exact = (
        "algorithm.beta=0.1",
        "algorithm.kl_estimator=full_reverse",
        "rollout.prompts_per_step=8",
        "rollout.num_generations=4",
    )

    def logprobs(*overrides: str) -> dict[str, float]:
        settings = config(folder, "train.max_tokens_per_micro_batch=2048", "model.precision=bf16", *overrides)
        return trainer_memory(settings, parse_hf_config(LLAMA), dp=2)["logprobs"]

    chunk = 512 * 49152 * 4 / 2**30
    assert logprobs("train.logprob_chunk=512")["logits"] == pytest.approx(chunk)
    found = logprobs("train.logprob_chunk=512", "rollout.max_completion_length=128", *exact)
    assert found["logits"] == pytest.approx(2 * chunk)
    assert found["ref_hidden"] == pytest.approx(8 * 4 * 128 / 2 * 576 * 2 / 2**30)


def test_a_teacher_costs_its_weights_a_chunk_of_logits_and_hidden_states(folder, tmp_path):
    (tmp_path / "teacher").mkdir()
    wide = LLAMA | dict(hidden_size=1152, num_hidden_layers=2)
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(wide))
    model = parse_hf_config(LLAMA)

    def memory(*overrides: str) -> dict[str, float]:
        settings = config(folder, "model.precision=bf16", "rollout.max_completion_length=128", *overrides)
        return trainer_memory(settings, model, dp=1)["logprobs"]

    alone, taught = memory(), memory(f"algorithm.teacher.path={tmp_path / 'teacher'}")
    assert taught["teachers"] == pytest.approx(
        2 * stage_parameters(parse_hf_config(wide), ParallelSection())[0] / 2**30
    )
    assert taught["logits"] == pytest.approx(2 * alone["logits"])
    assert taught["ref_hidden"] == pytest.approx(8 * 8 * 128 * 1152 * 2 / 2**30)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (dict(vocab_size=49151), "algorithm.teacher.0.path: .* has 49151 tokens, the policy 49152; name a teacher"),
        (dict(num_attention_heads=7, num_key_value_heads=7, hidden_size=448), "in the policy's layout: .*divisible"),
        (None, "algorithm.teacher.0.path: .*teacher does not exist"),
    ],
)
def test_a_teacher_that_the_policy_cannot_be_compared_with_is_a_problem_of_the_plan(folder, tmp_path, teacher, said):
    if teacher is not None:
        (tmp_path / "teacher").mkdir()
        (tmp_path / "teacher" / "config.json").write_text(json.dumps(LLAMA | teacher))
    taught = config(folder, f"algorithm.teacher.path={tmp_path / 'teacher'}", "parallel.tp=3", "rollout.tp=1")
    assert any(re.search(said, problem) for problem in told(plan(taught, 3)))


def test_a_repetition_penalty_keeps_derivatives_of_a_chunk_in_a_train_step(folder):
    def logits(phase: str, *overrides: str) -> float:
        settings = config(folder, "train.max_tokens_per_micro_batch=2048", "train.logprob_chunk=512", *overrides)
        return trainer_memory(settings, parse_hf_config(LLAMA), dp=1)[phase]["logits"]

    penalty = "rollout.repetition_penalty=1.1"
    assert logits("train", penalty) - logits("train") == pytest.approx(512 * 49152 * 4 / 2**30)
    assert logits("logprobs", penalty) == logits("logprobs")


def test_fused_logprobs_write_no_logits_without_gradients_and_little_with_them(folder):
    def logits(*overrides: str, phase: str = "train") -> float:
        fused = ("train.max_tokens_per_micro_batch=2048", "model.precision=bf16", "train.fused_logprobs=true")
        return trainer_memory(config(folder, *fused, *overrides), parse_hf_config(LLAMA), dp=2)[phase]["logits"] * 2**30

    head = 49152 * 576 * (4 + 2)
    assert logits() == pytest.approx(2048 * 49152 * 2 + head)
    assert logits("train.max_tokens_per_micro_batch=65536") == pytest.approx(2**30 + head)
    assert logits(phase="logprobs") == 0
    assert logits("train.logprobs_fp8_recipe=blockwise", phase="logprobs") == pytest.approx((2048 + 49152) * 576)
    assert logits("train.fused_logprobs=false") == pytest.approx(256 * 49152 * 4 + head)


@pytest.mark.parametrize(
    ("world_size", "overrides", "expected"),
    [
        (
            6,
            ["parallel.pp=2", "parallel.tp=2"],
            [
                "world_size: 6 is not a multiple of parallel.tp x parallel.cp x parallel.pp = 2 x 1 x 2 = 4; use 4 or "
                "8 ranks",
                "parallel.tp: num_attention_heads=9 is not divisible by tp=2; valid tp: 1, 3",
                "parallel.tp: num_key_value_heads=3 is not divisible by tp=2; valid tp: 1, 3",
            ],
        ),
        (
            1,
            ["parallel.pp=3"],
            ["world_size: 1 is not a multiple of parallel.tp x parallel.cp x parallel.pp = 1 x 1 x 3 = 3; use 3 ranks"],
        ),
        (
            1,
            ["rollout.tp=2"],
            [
                "rollout.tp: vLLM cannot split 9 heads, 3 KV heads, vocabulary 49152 and intermediate_size=1536 over "
                "tp=2; valid tp: 1, 3"
            ],
        ),
        (
            4,
            ["parallel.pp=4"],
            [
                "parallel.pp: num_hidden_layers=30 is not divisible by pp x vpp = 4; valid pp x vpp: 1, 2, 3, 5, 6, "
                "10, 15, 30; or set parallel.pipeline_layers=[7,8,8,7]"
            ],
        ),
        (
            1,
            [
                "rollout.max_prompt_length=8000",
                "rollout.max_completion_length=200",
                "train.max_tokens_per_micro_batch=9000",
            ],
            [
                "rollout.max_completion_length: max_prompt_length 8000 + max_completion_length 200 = 8200 tokens, but "
                "the model's limit is 8192 (max_position_embeddings); shorten by 8"
            ],
        ),
        (
            1,
            ["rollout.kv_cache_gb=0.001"],
            ["rollout.kv_cache_gb: 0.001 cannot hold one sequence of 80 tokens; use 0.1 or more"],
        ),
        (
            3,
            ["parallel.tp=3", "parallel.sequence_parallel=true", "train.max_tokens_per_micro_batch=80"],
            [
                "train.max_tokens_per_micro_batch: 80 is cut to 78, a multiple of parallel.tp = 3, and the longest "
                "sample has 80 tokens; use 81"
            ],
        ),
        (
            6,
            [
                "parallel.tp=3",
                "parallel.sequence_parallel=true",
                "parallel.cp=2",
                "train.max_tokens_per_micro_batch=82",
            ],
            [
                "train.max_tokens_per_micro_batch: 82 is cut to 72, a multiple of 2 x parallel.cp x parallel.tp = 12, "
                "and the longest sample has 80 tokens; use 84"
            ],
        ),
    ],
)
def test_all_problems_name_the_key_the_rule_and_the_nearest_valid_values(folder, world_size, overrides, expected):
    assert told(plan(config(folder, *overrides), world_size)) == expected


def test_uneven_stages_are_planned_with_their_own_layers(folder):
    made = plan(config(folder, "parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layers=[5,9,9,7]"), 2)
    assert told(made) == [] and "= tp 1 x pp 2 (vpp 2, layers 5 9 9 7) x dp 1" in str(made)
    model = parse_hf_config(LLAMA)
    first, second = layers_of_ranks(model, ParallelSection(pp=2, vpp=2, pipeline_layers=[5, 9, 9, 7]))
    assert first == [*range(5), *range(14, 23)] and second == [*range(5, 14), *range(23, 30)]
    even, uneven = (
        stage_parameters(model, ParallelSection(pp=2, pipeline_layers=layers)) for layers in (None, [16, 14])
    )
    assert uneven[0] - even[0] == even[1] - uneven[1] == layer_parameters(model, 0)

    def activations(*layers: int) -> float:
        made = config(folder, "parallel.pp=2", f"parallel.pipeline_layers={list(layers)}")
        return trainer_memory(made, model, dp=1)["train"]["activations"]

    # the first stage has more each time
    steps = activations(20, 10) - activations(18, 12), activations(22, 8) - activations(20, 10)
    assert steps[0] == pytest.approx(steps[1]) and steps[0] == pytest.approx(activations(18, 12) / 9, rel=0.05)


def test_values_of_latent_attention_count_with_a_width_of_their_own(folder):
    def activations(**wider: int) -> float:
        raw = DEEPSEEK_V3 | {key: DEEPSEEK_V3[key] + more for key, more in wider.items()}
        return trainer_memory(config(folder), parse_hf_config(raw), dp=1)["train"]["activations"]

    wider = activations(v_head_dim=8) - activations()
    assert wider > 0 and wider == pytest.approx(activations(qk_nope_head_dim=8) - activations())


def test_our_attention_on_a_gpu_keeps_copies_of_normalised_queries_keys_and_values(folder):
    raw = {**LLAMA, "model_type": "qwen3", "head_dim": 64}
    model = parse_hf_config(raw)
    queries, keys = 64 * model.num_heads, 64 * model.num_kv_heads

    def elements(*overrides: str, **changes: bool) -> float:
        made = config(folder, "model.precision=bf16", *overrides)
        return activation_elements(made, replace(model, **changes), gpu=True)[0]

    plain = elements("train.share_prompts=false")
    assert elements("run.deterministic=true") - plain == 2 * queries + keys
    assert elements(sinks=True) == elements("run.deterministic=true")
    assert elements("train.share_prompts=true", "parallel.cp=2") == elements("run.deterministic=true")
    # 8 responses of 128 tokens to a prompt of 96 see 8 x 224 keys in place of 8 x 128 + 96
    sizes = "rollout.max_prompt_length=96", "rollout.max_completion_length=128", "rollout.num_generations=8"
    shared = elements(*sizes, "train.max_tokens_per_micro_batch=2048")
    assert shared - plain == pytest.approx(2 * keys * (8 * 224 / (8 * 128 + 96) - 1))


def test_context_parallelism_shares_the_activations_and_the_sharded_optimizer(folder):
    def memory(*overrides: str) -> dict[str, float]:
        made = config(folder, "train.distributed_optimizer=true", "train.share_prompts=false", *overrides)
        return trainer_memory(made, parse_hf_config(LLAMA), dp=1)["train"]

    whole, half = memory(), memory("parallel.cp=2")
    for part, share in {"weights": 1, "gradients": 1, "activations": 0.5, "optimizer": 0.5}.items():
        assert half[part] == pytest.approx(share * whole[part]), part
    assert "= tp 1 x cp 2 x pp 1 x dp 3" in str(plan(config(folder, "parallel.cp=2"), 6))


def test_an_unknown_reward_is_a_problem_with_its_place(folder):
    (problem,) = told(plan(config(folder, "rewards.functions.0.function=exact_numbr"), 1))
    assert problem.startswith(
        "rewards.functions.0.function: `exact_numbr` is not a known reward function; did you mean `exact_number`?"
    )


def test_unknown_tools_and_schedulers_are_reported_with_the_key(folder):
    (problem,) = told(plan(config(folder, "multi_turn.tools=[calculater]"), 1))
    assert problem.startswith("multi_turn.tools.0: `calculater` is not a known tool; did you mean `calculator`?")
    assert told(plan(config(folder, "multi_turn.scheduler=math_tip_trick"), 1)) == []


def test_vllm_copies_kv_heads_when_there_are_fewer_than_devices():
    model = parse_hf_config(LLAMA | {"intermediate_size": 1152, "vocab_size": 36864})
    assert [tp for tp in range(1, 10) if vllm_can_split(model, tp)] == [1, 3, 9]


def test_vllm_cuts_a_vocabulary_that_it_has_padded_to_64():
    model = parse_hf_config(
        LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 768, "vocab_size": 65}
    )
    # 128 rows, which 3, 6 and 12 do not divide
    assert [tp for tp in range(1, 13) if vllm_can_split(model, tp)] == [1, 2, 4]


IN_STAGES = "parallel.tp=2 parallel.pp=2 parallel.sequence_parallel=true train.max_tokens_per_micro_batch=8192".split()
IN_STAGES += ["rollout.gpu_memory_utilization=0.4", "rollout.servers=8", "rollout.tp=1"]


def test_a_gpu_that_is_too_small_is_refused_with_a_share_that_fits():
    def problems(gpu: float, *overrides: str) -> list[str]:
        return told(
            plan(load_config(REPOSITORY / "configs" / "qwen2.5_7b_1node.yaml", [*IN_STAGES, *overrides]), 8, gpu)
        )

    beside = "train.offload=false"
    (problem,) = problems(64, beside)
    share = float(problem.partition("lower it to ")[2].split()[0])
    assert 0 < share < 0.4 and problems(64, beside, f"rollout.gpu_memory_utilization={share}") == []
    (problem,) = problems(40, beside)
    assert "raise parallel.tp, parallel.pp or parallel.cp" in problem
    assert problems(64) == problems(64, "rollout.gpu_memory_utilization=0.9") == []  # trainer and servers take turns
    (problem,) = problems(38)
    assert problem.startswith("parallel.tp: a trainer rank needs 48.0 GiB, but a GPU has 38; raise parallel.tp")
    (problem,) = problems(64, "rollout.gpu_memory_utilization=0.2")
    assert problem.startswith("rollout.tp: vLLM's 0.2 of a GPU must hold")
    (mixed,) = told(plan(load_config(REPOSITORY / "configs" / "qwen3_30b_a3b_4nodes.yaml"), 16, 40))
    assert "raise parallel.tp, parallel.ep, parallel.pp or parallel.cp" in mixed


def test_ram_that_is_too_small_for_what_leaves_the_gpus_is_refused():
    def problems(ram: float, gpu: float | None = 80, *overrides: str) -> list[str]:
        options = [*IN_STAGES, "train.share_prompts=false", *overrides]
        config = load_config(REPOSITORY / "configs" / "qwen2.5_7b_1node.yaml", options)
        return told(plan(config, 8, gpu, host_memory_gb=ram))

    (problem,) = problems(100)
    assert problem == (
        "train.offload: the ranks of a node keep 113.5 GiB in RAM (train.offload 113.5), but the node has 100.0; set "
        "it to false"
    )
    assert problems(114) == problems(100, None) == problems(100, 80, "train.offload=false") == []
    (problem,) = problems(20, 80, "train.offload=false", "train.optimizer_offload=true")
    assert problem.startswith("train.optimizer_offload: the ranks of a node keep 56.7 GiB")
    (problem,) = problems(20, 80, "train.offload=false", "model.offload_activations=1")
    assert problem.startswith("model.offload_activations: the ranks of a node keep") and problem.endswith("; lower it")


def test_layers_with_a_window_keep_its_tokens_and_a_batch(folder):
    windows = dict(model_type="gemma3_text", head_dim=64, sliding_window=512, tie_word_embeddings=True)
    windows |= dict(
        layer_types=["sliding_attention"] * 5 + ["full_attention"], num_hidden_layers=6, query_pre_attn_scalar=64
    )
    model, whole = parse_hf_config(LLAMA | windows | dict(max_position_embeddings=65536)), parse_hf_config(LLAMA)
    token = 2 * 3 * 64  # elements of keys and values of three heads
    for tokens, prefill in ((100, 8192), (2000, 1000), (32768, 8192), (511, 1), (32768, None)):
        naive = 0
        for window in (512, 512, 512, 512, 512, None):
            last = range(tokens)[-(window - 1 + prefill) :] if window and prefill else range(tokens)
            naive += sum(token for _ in last)
        assert kv_elements(model, 1, tokens, prefill) == naive
    assert kv_elements(whole, 1, 32768, 8192) == 30 * 32768 * token and kv_elements(whole, 3, 5) == 30 * 5 * token / 3
    (folder / "config.json").write_text(json.dumps(model.raw))
    sizes = ("rollout.max_prompt_length=32768", "train.max_tokens_per_micro_batch=65536", "rollout.kv_cache_gb=100")
    for precision, element in (("auto", 2), ("bf16", 2), ("fp32", 4)):  # vLLM computes in the trainer's dtype
        long = config(folder, *sizes, f"model.precision={precision}")
        sequence = kv_elements(model, 1, long.max_model_len, PREFILL_TOKENS)
        assert ServerMemory.of(long, model).kv_bytes(long.max_model_len, PREFILL_TOKENS) == element * sequence
        assert sum(ServerMemory.of(long, model).parts().values()) == pytest.approx(
            element * (num_parameters(model) + sequence) / 2**30
        )


def test_a_server_counts_where_it_shares_the_gpu(folder):
    def made(*overrides: str, gpu: float | None = None):
        return plan(config(folder, "model.precision=bf16", *overrides), 1, gpu)

    weights, longest = 2 * 134_515_008, 30 * 2 * 3 * 64 * 2
    colocated, dedicated = made("rollout.gpu_memory_utilization=0.3"), made("rollout.placement=dedicated")
    trainer, tokens = dedicated.memory["generate"]["total"], config(folder).max_model_len
    engine = (weights + tokens * longest) / 2**30
    held = colocated.memory["generate"]
    assert (held["vllm_weights"], held["kv_cache"]) == pytest.approx((weights / 2**30, tokens * longest / 2**30))
    assert colocated.memory["generate"]["total"] == pytest.approx(trainer + engine)
    assert colocated.memory["train"] == dedicated.memory["train"] and "kv_cache" not in dedicated.memory["generate"]
    assert "kv_cache" in str(colocated).partition("GiB on the fullest rank")[2]
    held = made("rollout.gpu_memory_utilization=0.3", gpu=80.0).memory["generate"]
    assert held["vllm_weights"] + held["kv_cache"] == pytest.approx(24.0)
    peak = dedicated.memory["train"]["total"]
    assert colocated.smallest_gpu == dedicated.smallest_gpu == pytest.approx(peak)
    assert made("rollout.gpu_memory_utilization=0.3", "train.offload=false").smallest_gpu == pytest.approx(peak / 0.7)
    turns, beside = (
        made("rollout.gpu_memory_utilization=0.3", f"train.offload={on}", gpu=80.0).memory for on in ("true", "false")
    )
    assert {part for part, size in turns["generate"].items() if size} == {"vllm_weights", "kv_cache", "total"}
    assert {part for part, size in turns["sync"].items() if size} == {"weights", "staging", "vllm_weights", "total"}
    own = made("rollout.placement=dedicated", gpu=80.0).memory["sync"]["staging"]
    assert (
        turns["sync"]["staging"] == beside["sync"]["staging"] == pytest.approx(own + 2 * 49152 * 576 / 2**30)
    )  # vLLM reloads the embedding
    assert turns["train"] == beside["train"] and beside["generate"]["total"] == pytest.approx(24.0 + trainer)
    share = made("rollout.placement=dedicated", "rollout.gpu_memory_utilization=0.01")
    assert share.smallest_gpu == pytest.approx(engine / 0.01) and "or its share of a vLLM server" in str(share)
    assert made("rollout.urls=['http://a:1']").smallest_gpu == pytest.approx(peak)
    (problem,) = told(made("rollout.placement=dedicated", "rollout.gpu_memory_utilization=0.01", gpu=10.0))
    assert problem.startswith("rollout.tp: vLLM's 0.01 of a GPU must hold")
    (problem,) = told(made("rollout.placement=dedicated", gpu=1.0))
    assert problem.startswith("parallel.tp: a trainer rank needs") and "but a GPU has 1; raise parallel.tp" in problem


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "no/such/folder",
            f"model.path: {Path('no/such/folder').absolute()} does not exist; name a folder, a hub model as owner/name",
        ),
        (
            "nobody/no-such-model",
            "model.path: nobody/no-such-model is not a local folder, and its config.json cannot be fetched",
        ),
        ("package:no_such_package", "model.path: no installed package 'no_such_package'"),
    ],
)
def test_a_model_that_is_nowhere_is_one_problem_beside_the_others(monkeypatch, path, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made = plan(load_config(REPOSITORY / "configs" / "quickstart.yaml", [f"model.path={path}", "parallel.pp=2"]), 1)
    assert len(told(made)) == 2 and told(made)[0].startswith("world_size") and told(made)[1].startswith(message)


def test_a_model_that_cannot_be_trained_is_refused(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gpt2"}))
    (problem,) = told(plan(config(folder), 1))
    assert problem.startswith("model: architecture gpt2 is not supported")
    (folder / "config.json").unlink()
    (problem,) = told(plan(config(folder), 1))
    assert "holds no config.json" in problem


def test_the_shape_of_a_known_model_is_read_without_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert num_parameters(load_hf_config(shape_folder("Qwen/Qwen2.5-7B-Instruct"))) == 7_615_616_512


def test_the_command_prints_the_plan_needs_no_torch_and_ends_with_code_2_on_problems(folder):
    code = "import sys; sys.modules['torch'] = None; from megagrpo.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        sys.executable,
        "-c",
        code,
        "plan",
        str(REPOSITORY / "configs" / "quickstart.yaml"),
        f"model.path={folder}",
    ]
    good = subprocess.run(arguments, capture_output=True, text=True)
    assert good.returncode == 0 and good.stderr == "" and "134.5M parameters" in " ".join(good.stdout.split())
    bad = subprocess.run([*arguments, "world_size=3", "parallel.pp=2"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == "" and "1 problem(s)\n  world_size: 3 is not a multiple" in bad.stderr


LLAMA_8B = dict(
    model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)
LLAMA_8B |= dict(intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False)


def test_adapters_of_llama_8b_are_as_many_as_peft_counts_and_alone_have_gradients(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = config(folder, "lora.rank=32", "lora.alpha=32", "model.precision=bf16", "algorithm.beta=0.1")
    assert "83,886,080 trained parameters, 1.04% of the model's" in dict(plan(settings, 1).rows)["LoRA"]
    memory = trainer_memory(settings, parse_hf_config(LLAMA_8B), dp=1)["generate"]
    gib = 83_886_080 / 2**30
    assert (memory["gradients"], memory["optimizer"], memory["reference"]) == pytest.approx(
        (4 * gib, 12 * gib, 2 * gib)
    )
    of_model = "algorithm.beta=0.1", "lora.rank=32", "model.reference_path=other"
    for storage in ("none", "nf4"):
        other = config(folder, *of_model, f"model.base_storage={storage}")
        memory = trainer_memory(other, parse_hf_config(LLAMA_8B), dp=1)["generate"]
        assert memory["reference"] == memory["weights"]


def test_adapters_in_experts_are_refused_and_all_linear_leaves_them_out(folder):
    (folder / "config.json").write_text(json.dumps(MIXED))
    (problem,) = told(plan(config(folder, "lora.rank=4", "lora.target_modules=[q_proj, up_proj]"), 1))
    assert problem.startswith(
        "lora.target_modules: up_proj of qwen3_moe are inside its experts; name those in lora.target_parameters"
    )
    made = dict(plan(config(folder, "lora.rank=4"), 1).rows)["LoRA"]
    assert f"{4 * 30 * (4 * 576 + 2 * 576 + 2 * 192):,} trained" in made


def test_adapters_go_on_the_projections_that_a_model_has(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "phi3", "rms_norm_eps": 1e-5}))
    made = dict(plan(config(folder, "lora.rank=4"), 1).rows)["LoRA"]
    assert "on qkv_proj, o_proj, gate_up_proj, down_proj: " in made
    assert f"{4 * 30 * (2 * 576 + 2 * 192 + 2 * 576 + 3 * 1536 + 2 * 576):,} trained" in made
    (problem,) = told(plan(config(folder, "lora.rank=4", "lora.target_modules=[q_proj, down_proj]"), 1))
    assert problem == (
        "lora.target_modules: phi3 has no q_proj; name some of qkv_proj, o_proj, gate_up_proj, down_proj, or choose "
        "all-linear"
    )


def test_adapters_of_lfm2_are_on_linears_with_names_of_its_own():
    import transformers

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**RELEASES["lfm2"])
        layers = transformers.AutoModelForCausalLM.from_config(config).model.layers
    sizes = [linear.in_features + linear.out_features for linear in layers.modules() if type(linear) is torch.nn.Linear]
    model = parse_hf_config(RELEASES["lfm2"])
    assert stage_adapters(model, ParallelSection(), LoraSection(rank=4)) == [4 * sum(sizes)]


def test_adapters_of_experts_are_counted_on_each_rank(folder):
    (folder / "config.json").write_text(json.dumps(MIXED))
    model = parse_hf_config(MIXED)
    chosen = (
        "lora.rank=4",
        "lora.target_modules=[]",
        "lora.target_parameters=[experts.gate_up_proj, experts.down_proj]",
    )
    settings = config(folder, *chosen)
    width, count = model.mixture.intermediate_size, model.mixture.count
    made = dict(plan(settings, 1).rows)["LoRA"]
    assert "on experts.gate_up_proj, experts.down_proj: " in made
    assert f"{30 * count * 4 * (2 * 576 + 3 * width):,} trained" in made
    sharded = ParallelSection(tp=2, etp=2, ep=2, pp=3)
    assert (
        stage_expert_adapters(model, sharded, settings.lora) == [10 * count // 2 * 4 * (2 * 576 + 3 * width // 2)] * 3
    )
    (problem,) = told(
        plan(config(folder, "lora.rank=4", "lora.target_parameters=[layers.30.mlp.experts.down_proj]"), 1)
    )
    assert problem == (
        "lora.target_parameters: qwen3_moe has no layers.30.mlp.experts.down_proj; the first of its experts is "
        "model.layers.0.mlp.experts.gate_up_proj"
    )
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    (problem,) = told(plan(config(folder, "lora.rank=4", chosen[2]), 1))
    assert problem.endswith("; it has no experts; leave the list empty")


def test_adapters_of_some_layers_are_counted_there(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    chosen = ("lora.rank=32", "lora.target_modules=[q_proj, mlp.down_proj]", "lora.layers_to_transform=[0, 31]")
    made = dict(plan(config(folder, *chosen), 1).rows)["LoRA"]
    assert "on q_proj, down_proj in 2 of 32 layers: " in made
    assert f"{2 * 32 * (2 * 4096 + 4096 + 14336):,} trained" in made
    (problem,) = told(plan(config(folder, "lora.rank=4", "lora.layers_to_transform=[31, 32]"), 1))
    assert problem == "lora.layers_to_transform: 32 is out of range: the model has 32 layers; use 0 to 31"
    (problem,) = told(plan(config(folder, "lora.rank=4", r"lora.target_modules=layers\..*\.q_proj"), 1))
    assert problem == (
        r"lora.target_modules: layers\..*\.q_proj matches no projection of llama; one is "
        "model.layers.0.self_attn.q_proj"
    )


def test_an_adapter_that_vllm_does_not_take_is_refused(folder):
    (folder / "config.json").write_text(
        json.dumps(LLAMA | {"model_type": "glm4", "head_dim": 32, "rms_norm_eps": 1e-5})
    )
    alone = ("lora.rank=4", "lora.sync=adapter")
    (problem,) = told(plan(config(folder, *alone), 1))
    assert problem.startswith("lora.sync: vLLM takes no adapter of the gate_up_proj of glm4; choose merged")
    assert told(plan(config(folder, *alone, "lora.target_modules=[q_proj, o_proj]"), 1)) == []


def test_products_in_fp8_need_wide_linears_whole_blocks_of_tokens_and_layers_that_exist(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    fp8 = ("model.fp8_recipe=mxfp8", "train.max_tokens_per_micro_batch=96")
    assert told(plan(config(folder, *fp8, "model.bf16_layers=[0, -32]"), 1)) == []
    (problem,) = told(plan(config(folder, *fp8, "model.bf16_layers=[32]"), 1))
    assert problem == "model.bf16_layers: 32 is out of range: the model has 32 layers; use -32 to 31"
    (problem,) = told(plan(config(folder, *fp8, "parallel.cp=2"), 2))
    assert problem.startswith(
        "train.max_tokens_per_micro_batch: 96 is cut to 64, a multiple of 32 (model.fp8_recipe mxfp8) x parallel.cp = "
        "64"
    )
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | dict(intermediate_size=14336 + 16)))
    assert told(plan(config(folder, "model.fp8_recipe=tensorwise"), 1)) == []
    (problem,) = told(plan(config(folder, *fp8), 1))
    said = "mxfp8 needs multiples of 32, but a rank's part of intermediate_size is 14352; choose none or another layout"
    assert problem == f"model.fp8_recipe: {said}"
    (folder / "config.json").write_text(json.dumps(MIXED | dict(moe_intermediate_size=24)))
    assert (
        "a rank's part of moe_intermediate_size is 24"
        in told(plan(config(folder, "model.fp8_recipe=blockwise"), 1))[-1]
    )


def test_activations_of_two_layers_are_on_a_gpu_and_the_others_on_the_host(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    model, found = parse_hf_config(LLAMA_8B), {}
    for leave in (0, 0.5, 1):
        settings = config(folder, "model.precision=bf16", f"model.offload_activations={leave}", "parallel.pp=2")
        stages = [stage["train"]["activations"] for stage in stage_memory(settings, model, dp=4)]
        found[leave] = (
            stages,
            host_memory(settings, model, 8, gpu=True)["activations"],
            host_memory(settings, model, 8)["activations"],
        )
    (stay, *none), (left, pinned, on_cpu) = found[0], found[1]
    assert none == [0, 0] and on_cpu == 0 and found[0.5][1] == pytest.approx(pinned / 2)
    # per layer: the first of two stages has two micro-batches in flight, each of 16 layers
    kept = (stay[0] - stay[1]) / 16
    assert stay[0] - left[0] == pytest.approx(30 * kept) and stay[1] - left[1] == pytest.approx(14 * kept)
    assert pinned == pytest.approx(4 * (30 + 14) * kept)


def test_products_in_fp8_keep_two_rounded_copies_of_each_linear_on_a_gpu(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))

    def copies(*overrides: str, gpu: bool = True) -> float:
        settings = config(folder, "model.precision=bf16", *overrides)
        return trainer_memory(settings, parse_hf_config(LLAMA_8B), dp=1, gpu=gpu)["generate"].get("fp8_weights", 0)

    layer = 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) / 2**30
    assert copies() == copies("model.fp8_recipe=blockwise", gpu=False) == 0
    assert copies("model.fp8_recipe=blockwise") == pytest.approx(32 * layer)
    assert copies("model.fp8_recipe=blockwise", "model.bf16_layers=[0, 31, -1]", "parallel.tp=2") == pytest.approx(
        30 * layer / 2
    )
    raw = MIXED | dict(intermediate_size=96)
    (folder / "config.json").write_text(json.dumps(raw))
    mixed = parse_hf_config(raw)
    settings = config(folder, "model.fp8_recipe=tensorwise", "model.precision=bf16")
    found = trainer_memory(settings, mixed, dp=1)["train"]["fp8_weights"] * 2**30 / 2
    dense = [name for name in range(mixed.num_layers) if not mixed.has_experts(name)]
    h, e = mixed.hidden_size, mixed.experts
    attention = h * mixed.head_dim * 2 * (mixed.num_heads + mixed.num_kv_heads)
    experts = 3 * h * e.intermediate_size * e.count
    assert found == pytest.approx(
        mixed.num_layers * attention + len(dense) * 3 * h * 96 + (mixed.num_layers - len(dense)) * experts
    )


def test_weights_kept_in_fp8_are_those_copies_and_nothing_else(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))

    def parts(*overrides: str, gpu: bool) -> dict[str, float]:
        settings = config(
            folder,
            "model.precision=bf16",
            "model.fp8_recipe=blockwise",
            "algorithm.beta=0.1",
            "train.distributed_optimizer=true",
            *overrides,
        )
        return trainer_memory(settings, parse_hf_config(LLAMA_8B), dp=1, gpu=gpu)["train"]

    linears = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) / 2**30
    rounded, kept, on_cpu = (
        parts(gpu=True),
        parts("model.fp8_param=true", gpu=True),
        parts("model.fp8_param=true", gpu=False),
    )
    assert rounded.pop("fp8_weights") == pytest.approx(2 * linears) and rounded == kept
    for part in ("weights", "reference"):
        assert kept[part] - on_cpu[part] == pytest.approx(linears)
    partly = parts("model.fp8_param=true", "model.bf16_layers=[0]", gpu=False)
    assert partly["weights"] - on_cpu["weights"] == pytest.approx(linears / 32)


def test_weights_in_fewer_bits_take_less_room_and_must_be_cut_into_blocks(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))

    def weights(storage: str) -> float:
        settings = config(folder, "lora.rank=32", "model.precision=bf16", f"model.base_storage={storage}")
        assert told(plan(settings, 1)) == []
        return trainer_memory(settings, parse_hf_config(LLAMA_8B), dp=1)["generate"]["weights"]

    linears = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) / 2**30
    assert weights("none") - weights("fp8") == pytest.approx(linears * (2 - 1 - 4 / 64))
    assert weights("none") - weights("nf4") == pytest.approx(linears * (2 - 0.5 - 4 / 64))
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | dict(intermediate_size=14336 + 32)))
    (problem,) = told(plan(config(folder, "lora.rank=32", "model.base_storage=nf4"), 1))
    assert problem.startswith(
        "model.base_storage: a rank's part of intermediate_size is 14368, not a multiple of 64; choose none"
    )
    (folder / "config.json").write_text(json.dumps(MIXED))
    model = parse_hf_config(MIXED)
    attention, experts = 576 * 64 * (2 * model.num_heads + 2 * model.num_kv_heads), 12 * 3 * 576 * 192
    assert stage_linears(model, ParallelSection(tp=2, ep=3, etp=1, pp=2)) == [15 * (attention // 2 + experts // 3)] * 2
    assert told(plan(config(folder, "lora.rank=4", "model.base_storage=fp8"), 1)) == []
    sharded = ("parallel.tp=3", "parallel.etp=2", "parallel.sequence_parallel=true")
    (problem,) = told(plan(config(folder, "lora.rank=4", "model.base_storage=nf4", *sharded), 6))
    assert problem == (
        "model.base_storage: a rank's part of moe_intermediate_size is 96, not a multiple of 64; choose none or another "
        "layout"
    )


def test_a_weight_sync_needs_room_for_the_module_that_vllm_reloads(folder):
    """Of DeepSeek-V3 in FP8 the experts of a layer: 256 x 3 x 7168 x 2048 weights over tp 8, in bf16 and in FP8."""
    path = Path(__file__).parents[3] / "configs" / "deepseek_v3_32nodes.yaml"

    def made(share: float):
        return plan(load_config(path, [f"rollout.gpu_memory_utilization={share}"]), 128, 178.0)

    assert not [problem for problem in made(0.9).problems if problem.keys[0].startswith("rollout.")]
    (problem,) = [problem for problem in made(0.99).problems if problem.keys[0].startswith("rollout.")]
    size = 256 * 3 * 7168 * 2048 / 8 * 3 / 2**30
    assert (
        f"leaves 1.8 GiB, but a weight sync reloads a module of {size:.1f} GiB beside it; lower "
        f"rollout.gpu_memory_utilization" in str(problem)
    )
    assert made(0.99).smallest_gpu == pytest.approx(size / 0.01)


def test_activations_without_fusions_stay_as_separate_tensors(folder):
    kept = {
        text: activation_elements(
            config(folder, f"model.fusions={text}", "train.share_prompts=false"), parse_hf_config(LLAMA), gpu=True
        )[0]
        for text in ("[]", "[rope]", "[bias_activation]")
    }
    assert kept["[]"] == kept["[rope]"] == kept["[bias_activation]"] + 2 * 1536
    assert (
        len(
            {
                activation_elements(config(folder, f"model.fusions={text}"), parse_hf_config(LLAMA), gpu=False)[0]
                for text in kept
            }
        )
        == 1
    )


def test_stages_share_the_layers_of_a_server_and_copies_its_experts(folder):
    def memory(model: dict, *overrides: str) -> dict[str, float]:
        return ServerMemory.of(config(folder, "model.precision=bf16", *overrides), parse_hf_config(model)).parts()

    untied = LLAMA | {"tie_word_embeddings": False}
    whole, half = memory(untied), memory(untied, "rollout.pp=2")
    assert half["kv_cache"] == pytest.approx(whole["kv_cache"] / 2)
    assert half["vllm_weights"] == pytest.approx(whole["vllm_weights"] / 2, rel=1e-4)  # an embedding on each stage
    # eight layers on the largest stage
    assert memory(untied, "rollout.pp=4")["kv_cache"] == pytest.approx(whole["kv_cache"] * 8 / 30)
    experts = 2 * 30 * 12 * 3 * 576 * 192 / 2**30
    plain, shared = memory(MIXED), memory(MIXED, "rollout.dp=3", "rollout.enable_expert_parallel=true")
    assert plain["vllm_weights"] - shared["vllm_weights"] == pytest.approx(experts * 2 / 3)


def test_a_server_needs_a_layer_for_each_stage_and_an_expert_for_each_worker(folder):
    (folder / "config.json").write_text(json.dumps(MIXED))
    (problem,) = told(plan(config(folder, "rollout.pp=31"), 1))
    assert problem == "rollout.pp: 31 stages share 30 layers, which leaves stages without any; set it to 30 or less"
    (problem,) = told(plan(config(folder, "rollout.dp=13", "rollout.enable_expert_parallel=true"), 1))
    assert problem.startswith(
        "rollout.tp: 1 x rollout.dp 13 workers share 12 experts, which leaves workers without any; lower one"
    )
