"""Reading config.json and the rules for layouts, without torch."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from megagrpo.config import ParallelSection, ProblemError
from megagrpo.families.config_keys import architecture_problems
from megagrpo.families.family_index import ALIASES, FAMILIES
from megagrpo.families.hf_config import architecture_differences, load_hf_config, model_problems, parse_hf_config
from megagrpo.families.shared.architecture import Indexer
from megagrpo.policy.build import rotary_frequencies
from tests.family_examples import RELEASES
from tests.unit.families.published_configs import MORE
from tests.unit.for_each import for_each

SMOLLM2 = dict(
    model_type="llama", num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3
) | dict(intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)
PHI3 = dict(model_type="phi3", hidden_size=576, num_attention_heads=9, partial_rotary_factor=0.75) | dict(
    max_position_embeddings=8192
)
PHI3 |= {"rms_norm_eps": 1e-5}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
DEEPSEEK_V3 = (
    dict(model_type="deepseek_v3", num_key_value_heads=9, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16)
    | dict(qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=4)
    | dict(moe_intermediate_size=64, scoring_func="sigmoid", topk_method="noaux_tc", n_group=4, topk_group=2)
    | dict(first_k_dense_replace=3, routed_scaling_factor=2.5)
)
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
}
GPT_OSS = dict(model_type="gpt_oss", tie_word_embeddings=False, num_local_experts=8, num_experts_per_tok=2, head_dim=64)
GPT_OSS |= {
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def cuts(raw: dict, parallel: ParallelSection) -> list[str]:
    """The printed reason why a model cannot be cut."""
    try:
        return list(map(str, model_problems(parse_hf_config(raw), parallel)))
    except ProblemError as error:
        return list(map(str, error.problems))


def test_importing_it_needs_no_torch():
    code = "import sys, megagrpo.families.hf_config; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_problems_name_the_key_and_the_valid_sizes():
    assert cuts(SMOLLM2, ParallelSection(tp=3, pp=2)) == []
    two = cuts(SMOLLM2, ParallelSection(tp=2))
    assert two[0] == "parallel.tp: num_attention_heads=9 is not divisible by tp=2; valid tp: 1, 3"
    assert two[1].startswith("parallel.tp: num_key_value_heads=3 is not divisible by tp=2")
    assert len(two) == 2  # 1536 is divisible
    (deep,) = cuts(SMOLLM2, ParallelSection(pp=4, vpp=2))
    assert deep == (
        "parallel.pp: num_hidden_layers=30 is not divisible by pp x vpp = 8; valid pp x vpp: 1, 2, 3, 5, 6, 10, 15, "
        "30; or set parallel.pipeline_layers=[3,4,4,4,4,4,4,3]"
    )


def test_layers_per_stage_must_add_up_and_the_suggestion_does():
    assert cuts(SMOLLM2, ParallelSection(pp=4, pipeline_layers=[6, 9, 9, 6])) == []
    (problem,) = cuts(SMOLLM2, ParallelSection(pp=4, pipeline_layers=[6, 9, 9, 7]))
    assert problem == (
        "parallel.pipeline_layers: [6, 9, 9, 7] sums to 31, not to num_hidden_layers=30; for example "
        "parallel.pipeline_layers=[7,8,8,7]"
    )
    for layers, pp in itertools.product(range(1, 13), range(1, 13)):
        problems = cuts(SMOLLM2 | {"num_hidden_layers": layers}, ParallelSection(pp=pp))
        if pp > layers:  # no stage without a layer
            assert "pipeline_layers" not in problems[0]
        elif layers % pp:
            suggested = json.loads(problems[0].partition("parallel.pipeline_layers=")[2])
            assert (
                len(suggested) == pp
                and cuts(SMOLLM2 | {"num_hidden_layers": layers}, ParallelSection(pp=pp, pipeline_layers=suggested))
                == []
            )
        else:
            assert problems == []


def test_heads_that_divide_but_groups_that_do_not_are_reported():
    (problem,) = cuts(SMOLLM2 | {"intermediate_size": 1152}, ParallelSection(tp=9))
    assert "num_key_value_heads=3 is not divisible by tp=9; valid tp: 1, 3" in problem


def test_an_architecture_without_a_reference_says_so():
    (problem,) = architecture_problems(dict(model_type="bailing_moe_v2", architectures=["BailingMoeV2ForCausalLM"]))
    assert "transformers has no class for it" in problem and "no reference to compare" in problem


def test_an_unknown_architecture_names_the_supported_ones():
    (problem,) = architecture_problems({"model_type": "gpt2"})
    assert "architecture gpt2 is not supported: no file" in problem
    assert problem.endswith(f"Supported (docs/models.md): llama, qwen3 and {len(FAMILIES) - 2} more")
    with pytest.raises(ValueError, match="gpt2"):
        parse_hf_config({"model_type": "gpt2"})


@for_each(
    ("change", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 29 + ["linear_attention"]}, "linear_attention"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"] * 29},
            "layer_types has 29 entries for num_hidden_layers=30",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        (PHI3 | {"resid_pdrop": 0.1}, "resid_pdrop"),
        (PHI3 | {"embd_pdrop": 0.1}, "embd_pdrop"),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"type": "su"}},
            "rope_type 'su' is not supported for phi3; supported: default, longrope",
        ),
        (PHI3 | {"rope_scaling": LONGROPE | {"attention_factor": 1.2}}, "attention_factor"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "short_mscale"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_mscale": 1.2}}, "long_mscale"),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 32}},
            "long_factor has 32 numbers; a head needs 24",
        ),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "'linear' in blocks with a window",
        ),
        (MIXTRAL | {"router_jitter_noise": 0.01}, "router_jitter_noise"),
        ({"hidden_size": "576"}, "hidden_size is '576' in config.json; it must be a positive whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"dtype": "float7"}, "dtype is 'float7' in config.json; it must be one of bfloat16, float16"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attention_multiplier": 0.0078125}, "attention_multiplier"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3 | {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3 | {"topk_method": None}, "set it to noaux_tc"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3 | {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": 30}, "first_k_dense_replace"),
        (DEEPSEEK_V3 | {"n_shared_experts": 0}, "n_shared_experts"),
        (DEEPSEEK_V3 | {"n_group": 3}, "n_group=3"),
        (DEEPSEEK_V3 | {"n_group": 8, "topk_group": 1}, "topk_group=1"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK_V2 | {"topk_method": "greedy"}, "n_group=4"),
        (DEEPSEEK_V2 | {"scoring_func": "sigmoid"}, "scoring_func"),
        (GPT_OSS | {"attention_bias": False}, "attention_bias"),
        (GPT_OSS | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        (GPT_OSS | {"swiglu_limit": 6.0}, "swiglu_limit"),
        (GPT_OSS | {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        (GPT_OSS | {"rope_scaling": None}, "rope_type 'default' is not supported for gpt_oss; supported: yarn"),
        (
            GPT_OSS | {"layer_types": ["full_attention", "sliding_attention"] * 15},
            "must alternate sliding_attention and full_attention",
        ),
    ],
)
def test_what_the_model_code_cannot_do_is_refused(change, word):
    (problem,) = architecture_problems(SMOLLM2 | change)
    assert word in problem


MIXED_TYPES = ["sliding_attention", "full_attention"] * 15


@for_each(
    ("change", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 30),
        (GPT_OSS | {"sliding_window": 9}, [9, None] * 15),
        ({"model_type": "mistral", "sliding_window": 7}, [7] * 30),
        ({"model_type": "mistral", "sliding_window": None}, []),
        (MIXTRAL, []),
        (MIXTRAL | {"sliding_window": 9}, [9] * 30),
        ({"model_type": "qwen2", "sliding_window": 9}, []),
        ({"model_type": "qwen2", "sliding_window": 9, "layer_types": MIXED_TYPES}, []),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, [None] * 28 + [9] * 2),
        (
            {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3 + [9] * 27,
        ),
        (
            {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True, "layer_types": MIXED_TYPES},
            [9, None] * 15,
        ),
    ],
)
def test_the_windows_are_those_of_transformers(change, windows):
    import transformers

    raw = SMOLLM2 | change
    assert list(parse_hf_config(raw).windows) == windows
    theirs = transformers.AutoConfig.for_model(**raw)
    types = getattr(theirs, "layer_types", ["sliding_attention"] * 30)
    assert [theirs.sliding_window if kind == "sliding_attention" else None for kind in types] == (
        windows or [None] * 30
    )


def test_the_blocks_that_rotate_are_those_of_transformers():
    import transformers

    for change in ({}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 0] * 15}):
        raw = SMOLLM2 | {"model_type": "smollm3"} | change
        unrotated = parse_hf_config(raw).unrotated
        rotated = [int(block not in unrotated) for block in range(30)]
        assert rotated == transformers.AutoConfig.for_model(**raw).no_rope_layers


@pytest.mark.parametrize(
    ("kind", "cls"),
    [("bloom", "BloomForCausalLM"), ("gpt_neox", "GPTNeoXForCausalLM"), ("mamba", "MambaForCausalLM"), ("gpt9", None)],
)
def test_no_family_is_guessed_for_a_model_of_another_class(kind, cls):
    (problem,) = architecture_problems({"model_type": kind, "architectures": [cls] if cls else None})
    assert f"architecture {kind} is not supported: no file in megagrpo/families describes it" in problem
    assert "docs/add_a_model.md" in problem
    assert "set model_type to" not in problem and "nearest" not in problem


@pytest.mark.parametrize(("kind", "part"), [("jamba", "Mamba-1"), ("phi4_multimodal", "vLLM no longer has a class")])
def test_a_known_model_beyond_this_code_is_told_why(kind, part):
    (problem,) = architecture_problems({"model_type": kind})
    assert problem.startswith(f"architecture {kind} is not supported: ") and part in problem


NEMOTRON_H = RELEASES["nemotron_h"]
FALCON_H1 = RELEASES["falcon_h1"]
GRANITE_H = RELEASES["granitemoehybrid"]


@for_each(
    ("raw", "reason"),
    [
        (FALCON_H1 | dict(mlp_multipliers=[1.0]), "mlp_multipliers is [1.0] in config.json; it must be 2 numbers"),
        (FALCON_H1 | dict(ssm_multipliers=[1, 1, 1, 1, "x"]), "it must be 5 numbers"),
        (FALCON_H1 | dict(key_multiplier="x"), "key_multiplier is 'x' in config.json; it must be a number"),
        (FALCON_H1 | dict(mamba_d_ssm=1024), "mamba_n_heads x mamba_d_head = 1536 is not mamba_d_ssm, or"),
        (FALCON_H1 | dict(mamba_rms_norm=True, mamba_norm_before_gate=True), "mamba_norm_before_gate=True is not"),
        (FALCON_H1 | dict(rope_theta=None), "config.json lacks rope_theta, for which transformers and vLLM"),
        (NEMOTRON_H | dict(hybrid_override_pattern="MX"), "must name M, *, - or E for each block, not 'MX'"),
        (NEMOTRON_H | dict(num_hidden_layers=50), "num_hidden_layers=50, but hybrid_override_pattern or"),
        (NEMOTRON_H | dict(moe_latent_size=64), "experts on latents"),
        (NEMOTRON_H | dict(time_step_limit=[0.0, 1.0]), "time_step_limit=[0.0, 1.0] is not supported"),
        (GRANITE_H | dict(mamba_n_groups=2), "mamba_n_groups=2: transformers normalises over all groups together"),
        (GRANITE_H | dict(mamba_n_heads=32), "mamba_n_heads x mamba_d_head = 2048 is not mamba_expand x hidden_size"),
        (GRANITE_H | dict(mamba_d_head="auto"), "mamba_d_head is 'auto' in config.json; it must be a positive"),
    ],
)
def test_sizes_and_options_of_mamba_that_no_code_computes_are_refused(raw, reason):
    assert [problem for problem in architecture_problems(raw) if reason in problem]


def test_a_time_step_limit_as_transformers_writes_it_is_read(tmp_path):
    limit = [0.0, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_H | dict(time_step_limit=limit)))
    assert load_hf_config(tmp_path).raw["time_step_limit"] == [0.0, float("inf")]


def test_a_model_whose_class_is_known_under_another_name_is_told_that_name_and_loads_with_it():
    renamed = SMOLLM2 | DEEPSEEK_V3 | {"model_type": "our_r1", "architectures": ["DeepseekV3ForCausalLM"]}
    (problem,) = architecture_problems(renamed)
    assert "as model_type our_r1, but as deepseek_v3; set model_type to deepseek_v3 in a copy of config.json" in problem
    assert architecture_problems(renamed | {"model_type": "deepseek_v3"}) == []


def test_an_alias_is_the_family_and_keeps_its_name_in_config_json():
    kimi = SMOLLM2 | DEEPSEEK_V3 | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    alias, own = (parse_hf_config(kimi | {"model_type": kind}) for kind in ("kimi_k2", "deepseek_v3"))
    assert alias == own and alias.family == "deepseek_v3" and alias.linears == own.linears
    assert alias.raw["model_type"] == "kimi_k2"
    (problem,) = architecture_problems(kimi | {"architectures": ["KimiForCausalLM"]})
    assert "architectures=['KimiForCausalLM'] with model_type=kimi_k2, whose class is DeepseekV3ForCausalLM" in problem
    assert not ALIASES.keys() & FAMILIES.keys()


def test_a_multimodal_model_is_refused_with_a_way_out():
    (problem,) = architecture_problems({"model_type": "other_vl", "text_config": {"model_type": "llama"}})
    assert problem == (
        "other_vl is multimodal: the text model llama is supported, but no `Wrapper` in megagrpo/families "
        "describes other_vl, the model around it. docs/add_a_model.md shows how to add one"
    )
    (problem,) = architecture_problems({"model_type": "gemma3", "text_config": {"model_type": "llama"}})
    assert problem == "gemma3 is supported with the text model gemma3_text, not with llama: docs/add_a_model.md"


@pytest.mark.parametrize(
    ("text", "nearest"), [("qwen9_text", "qwen3, "), ("mistral_text_9", "mistral and "), (None, "")]
)
def test_a_multimodal_model_without_a_supported_text_model_is_told_the_supported_families(text, nearest):
    (problem,) = architecture_problems({"model_type": "new_vl", "text_config": {"model_type": text}})
    said = f"new_vl is multimodal, and no file in megagrpo/families describes its text model {text or 'without'}"
    fix = f"docs/add_a_model.md shows how to write that file. Supported (docs/models.md): {nearest}"
    assert problem.startswith(said) and fix in problem and " more; multimodal: exaone4_5, gemma3" in problem


def test_a_model_type_that_is_no_name_is_refused():
    assert architecture_problems({"model_type": ["llama"]}) == [
        "model_type is ['llama'] in config.json; it must be a name"
    ]


SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
GEMMA = {key: SMOLLM2[key] for key in SIZES} | {"num_attention_heads": 8, "num_key_value_heads": 4}


def test_what_gemmas_config_leaves_out_is_what_transformers_takes():
    import transformers

    for kind in ("gemma2", "gemma3_text"):
        ours, theirs = parse_hf_config(GEMMA | {"model_type": kind}), transformers.AutoConfig.for_model(kind, **GEMMA)
        assert (ours.head_dim, ours.tied_embeddings) == (theirs.head_dim, theirs.tie_word_embeddings) == (256, True)
        assert (ours.score_cap, ours.logit_cap) == (theirs.attn_logit_softcapping, theirs.final_logit_softcapping)
        assert ours.softmax_scale == theirs.query_pre_attn_scalar**-0.5
        sliding = [theirs.sliding_window if t == "sliding_attention" else None for t in theirs.layer_types]
        assert list(ours.windows) == sliding and len({*sliding}) == 2
    rotary = theirs.rope_parameters
    assert ours.rope_theta == rotary["full_attention"]["rope_theta"] == 1e6
    assert ours.local_rope_theta == rotary["sliding_attention"]["rope_theta"] == 1e4


@pytest.mark.parametrize("written", ["old", "new"])
def test_both_ways_to_write_gemma_3s_angles_are_read(written):
    import transformers

    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = transformers.AutoConfig.for_model("gemma3_text", **GEMMA, **old)
    ours = parse_hf_config(config.to_dict() if written == "new" else GEMMA | old | {"model_type": "gemma3_text"})
    assert (ours.rope_theta, ours.local_rope_theta, ours.rope_type) == (2e6, 3e4, "linear")


def test_a_missing_size_is_named():
    raw = {k: v for k, v in SMOLLM2.items() if k != "hidden_size"}
    assert architecture_problems(raw) == ["config.json lacks hidden_size"]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("phi3", ["rms_norm_eps"]), ("glm4", ["num_key_value_heads", "head_dim", "rms_norm_eps"])],
    ids=["phi3", "glm4"],
)
def test_a_key_whose_default_in_transformers_is_another_is_missed(kind, keys):
    raw = {k: v for k, v in SMOLLM2.items() if k not in keys} | {"model_type": kind}
    assert architecture_problems(raw) == [f"config.json lacks {key}" for key in keys]


def test_a_missing_or_broken_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_hf_config(tmp_path)
    for text, problem in (
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "must contain a JSON object"),
    ):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json .*{problem}.*; download it again"):
            load_hf_config(tmp_path)


MIXED = SMOLLM2 | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("change", "blocks"),
    [
        ({}, range(30)),
        ({"mlp_only_layers": [0, 29]}, range(1, 29)),
        ({"decoder_sparse_step": 3}, range(2, 30, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, range(3, 30, 2)),
        ({"model_type": "mixtral", "moe_intermediate_size": None}, range(30)),
    ],
)
def test_the_blocks_with_experts_are_those_of_transformers(change, blocks):
    import transformers

    config = parse_hf_config(MIXED | change)
    assert [b for b in range(30) if config.has_experts(b)] == list(blocks)
    kind = transformers.Qwen3MoeConfig if config.family == "qwen3_moe" else transformers.MixtralConfig
    tiny = MIXED | change | dict(hidden_size=18, intermediate_size=8, moe_intermediate_size=8, vocab_size=8)
    names = transformers.AutoModelForCausalLM.from_config(kind(**tiny)).state_dict()
    assert sorted({int(name.split(".")[2]) for name in names if ".experts." in name}) == list(blocks)


def test_the_weights_of_a_tokens_experts_add_up_to_1_where_the_family_says_so():
    assert not parse_hf_config(MIXED).experts.normalized
    assert parse_hf_config(MIXED | {"norm_topk_prob": True}).experts.normalized
    mixtral = parse_hf_config(MIXED | {"model_type": "mixtral", "moe_intermediate_size": None}).experts
    assert mixtral.normalized and mixtral.intermediate_size == 1536


def test_a_config_of_experts_that_lacks_a_size_or_has_no_experts_says_so():
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    assert architecture_problems({k: v for k, v in MIXED.items() if k not in sizes}) == [
        "config.json lacks num_experts_per_tok",
        "config.json lacks num_experts or num_local_experts",
        "config.json lacks moe_intermediate_size",
    ]
    (dense,) = architecture_problems(MIXED | {"mlp_only_layers": list(range(30))})
    assert dense.startswith("mlp_only_layers and decoder_sparse_step leave no block with experts")
    (greedy,) = architecture_problems(MIXED | {"num_experts_per_tok": 9})
    assert greedy == "num_experts_per_tok=9 is more than the 8 experts"


def test_the_width_of_dense_mlps_matters_only_where_there_are_some():
    odd = MIXED | {"intermediate_size": 1535}
    assert cuts(odd, ParallelSection(tp=3)) == [
        "parallel.etp: the experts' width 64 is not divisible by etp=3; valid etp: 1, 2, 4, 8, 16, 32, 64"
    ]
    (problem,) = cuts(odd | {"mlp_only_layers": [4]}, ParallelSection(tp=3, etp=1))
    assert problem == "parallel.tp: intermediate_size=1535 is not divisible by tp=3; valid tp: 1"


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Phi3"])
def test_what_transformers_writes_is_read_with_its_own_values(kind, tmp_path):
    import transformers

    theirs = getattr(transformers, f"{kind}Config")(tie_word_embeddings=True, vocab_size=77)
    theirs.save_pretrained(tmp_path)
    ours = load_hf_config(tmp_path)
    assert ours.family == kind.lower()
    assert (ours.num_layers, ours.hidden_size, ours.intermediate_size) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
    )
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.head_dim, ours.tied_embeddings, ours.norm_eps) == (head_dim, True, theirs.rms_norm_eps)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_older_configs_with_rope_theta_and_torch_dtype_at_the_top_are_read():
    old = SMOLLM2 | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "bfloat16"}
    ours = parse_hf_config(json.loads(json.dumps(old)))
    assert (ours.rope_theta, ours.rope_type, ours.dtype) == (5e5, "linear", "bfloat16")


@pytest.mark.parametrize("kind", ["phi3", "glm", "glm4"])
def test_where_config_json_names_no_share_of_a_head_positions_turn_as_much_as_in_transformers(kind):
    import transformers

    raw = SMOLLM2 | dict(model_type=kind, head_dim=64, rms_norm_eps=1e-5)
    theirs = transformers.AutoConfig.for_model(**raw).rope_parameters.get("partial_rotary_factor", 1.0)
    assert parse_hf_config(raw).partial_rotary_factor == theirs


def test_longrope_has_the_frequencies_that_vllm_takes_for_the_longest_sequence():
    config = parse_hf_config(SMOLLM2 | PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 4096})
    (short, factor), (long, same), (unknown, _) = (
        rotary_frequencies(config, longest) for longest in (4096, 4097, None)
    )
    assert len(short) == 24 and (short == 2 * long).all() and (short == unknown).all()
    assert factor == same == pytest.approx((1 + math.log(2) / math.log(4096)) ** 0.5)


def test_an_alias_that_transformers_does_not_know_has_the_same_rotary_frequencies():
    yarn = {
        "rope_scaling": dict(
            type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
        )
    }
    alias, known = (
        parse_hf_config(SMOLLM2 | DEEPSEEK_V3 | yarn | {"model_type": kind}) for kind in ("kimi_k2", "deepseek_v3")
    )
    assert (rotary_frequencies(alias, None)[0] == rotary_frequencies(known, None)[0]).all()


def test_the_vocabulary_is_padded_to_a_multiple_of_tp():
    config = parse_hf_config(SMOLLM2 | {"vocab_size": 127})
    assert [config.padded_vocab(tp) for tp in (1, 2, 3)] == [127, 128, 129]


def release(kind: str, **changes) -> dict:
    """config.json of the family's release with other values; None removes a key."""
    raw = RELEASES[kind] | changes
    return {key: value for key, value in raw.items() if value is not None or key not in changes}


@for_each(
    ("raw", "said"),
    [
        (
            release("glm4_moe_lite", first_k_dense_replace=2),
            "first_k_dense_replace=2 without mlp_layer_types, for which",
        ),
        (
            release("glm4_moe_lite", mlp_layer_types=["dense"] * 3 + ["sparse"] * 44),
            "mlp_layer_types does not have 'dense' for the first 1 blocks",
        ),
        (
            release("deepseek_v32", mlp_layer_types=["sparse"] * 61),
            "mlp_layer_types does not have 'dense' for the first 3",
        ),
        (release("glm_moe_dsa", indexer_types=["full", "shared"] * 39), "indexer_types does not have 'full' for every"),
        (release("glm_moe_dsa", index_topk_freq=4), "index_topk_freq=4; blocks that share the indexer"),
        (release("glm_moe_dsa", indexer_rope_interleave=False), "indexer_rope_interleave=False; only the rotation of"),
        (release("deepseek_v32", indexer_rope_interleave=True), "indexer_rope_interleave=True; only the rotation of"),
        (release("deepseek_v32") | dict(q_lora_rank=None), "q_lora_rank is null; the indexer reads the latent"),
        (release("deepseek_v32", index_head_dim=32), "index_head_dim=32 is less than qk_rope_head_dim=64"),
        (release("deepseek_v32", index_topk=None), "config.json lacks index_topk"),
        (release("minimax_m2", attn_type_list=[1, 0] * 31), "only 1, softmax attention in every block, is supported"),
        (release("minimax_m2", rotary_dim=256), "rotary_dim=256 is more than head_dim=128"),
        (
            release("minimax_m2", partial_rotary_factor=0.25),
            "rotary_dim=64, and partial_rotary_factor=0.25 of head_dim",
        ),
        (release("minimax_m2", use_routing_bias=None), "config.json lacks use_routing_bias; set it to True, or vLLM"),
        (release("minimax_m2", qk_norm_type="per_head"), "qk_norm_type='per_head'; only per_layer, a norm over all"),
    ],
)
def test_what_transformers_and_vllm_read_differently_or_neither_computes_is_refused(raw, said):
    (problem,) = architecture_problems(raw)
    assert said in problem


def test_releases_with_an_indexer_and_with_an_absolute_size_of_rotation_are_read_as_transformers_does():
    import transformers

    own = parse_hf_config(release("deepseek_v32"))
    assert (
        own.indexer == Indexer(heads=64, head_dim=128, keys=2048, interleaved=False) and len(own.mixture.blocks) == 58
    )
    assert parse_hf_config(release("glm_moe_dsa")).indexer == Indexer(32, 128, 2048, True)
    mini = parse_hf_config(release("minimax_m2"))
    theirs = transformers.AutoConfig.for_model(**release("minimax_m2")).rope_parameters
    assert (mini.partial_rotary_factor, mini.rope_theta) == (theirs["partial_rotary_factor"], theirs["rope_theta"])
    assert mini.rotary_dim == 64 and mini.experts.sigmoid and mini.experts.bias and mini.wide_qk_norm


def test_a_text_model_may_lack_the_tower_of_the_one_it_is_compared_with():
    whole = parse_hf_config(MORE["Gemma 3 4B it"])
    assert whole.vision is not None
    assert not architecture_differences(whole, replace(whole, vision=None))
    other = replace(whole, vision=replace(whole.vision, image_token=1))
    assert [*architecture_differences(whole, other)] == ["vision"]
