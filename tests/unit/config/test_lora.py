"""Invalid settings of adapters, and settings derived from them."""

import pytest

from megagrpo.config import LoraSection, load_config
from tests.unit.config.test_config import SMALLEST, problems, write
from tests.unit.for_each import for_each


@for_each(
    ("override", "message"),
    [
        (
            "lora.target_modules=[q_proj, lm_head]",
            "lora.target_modules: lm_head: embeddings and LM head have no adapters; choose all-",
        ),
        (
            "lora.target_modules=query",
            "lora.target_modules: query: unknown projection; choose all-linear or a list of q_proj, k_proj",
        ),
        ("lora.target_modules=[]", "lora.target_modules: the list is empty, so nothing is trained; choose all-linear"),
        (
            "lora.adapter_path=/there",
            "lora.adapter_path: /there needs lora.rank, the rank of that adapter; set lora.rank",
        ),
        (
            "lora.target_modules=model.layers.[0",
            "lora.target_modules: model.layers.[0 is no regular expression (unterminated character set at position 13)",
        ),
        (
            "lora.target_modules=.*",
            "lora.target_modules: .* matches lm_head: embeddings and LM head have no adapters; match projections alone",
        ),
        (
            "lora.layers_to_transform=[]",
            "lora.layers_to_transform: the list is empty, so nothing is trained; name layers, or choose null for all",
        ),
        (
            "lora.target_parameters=[mlp.experts.gate_proj]",
            "lora.target_parameters: mlp.experts.gate_proj: not a parameter of experts; choose among experts.gate_up_proj",
        ),
        (
            "debug.dump_steps=[1],lora.dropout=0.1",
            "debug.dump_steps: megagrpo audit cannot recompute a step with lora.dropout 0.1; leave dump_steps empty, or",
        ),
    ],
)
def test_what_adapters_cannot_do_is_refused(tmp_path, override, message):
    rank = "lora.rank=0" if "adapter_path" in override else "lora.rank=8"
    several = override.split(",lora.")  # the second key again
    _, problem = problems(write(tmp_path, SMALLEST), rank, several[0], *(f"lora.{more}" for more in several[1:]))
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "lora.dropout=0.1",
            "lora.target_parameters: experts have no dropout of adapters, in PEFT too, but lora.dropout",
        ),
        (
            "lora.sync=adapter",
            "lora.sync: adapter, but vLLM applies adapters of experts only with kernels that have not",
        ),
    ],
)
def test_what_adapters_of_experts_exclude_is_refused(tmp_path, override, message):
    experts = ("lora.rank=8", "lora.target_parameters=[experts.down_proj]", "lora.target_modules=[]")
    _, problem = problems(write(tmp_path, SMALLEST), *experts, override)
    assert problem.startswith(message)


def test_an_expression_names_its_layers_itself(tmp_path):
    _, problem = problems(
        write(tmp_path, SMALLEST), "lora.rank=8", r"lora.target_modules=.*\.q_proj", "lora.layers_to_transform=[1]"
    )
    assert problem.startswith(
        r"lora.layers_to_transform: is not supported with a regular expression in lora.target_modules (.*\.q_proj); match"
    )


@pytest.mark.parametrize(
    "chosen",
    [
        dict(target_modules="all-linear", layers_to_transform=None),
        dict(target_modules=["q_proj", "layers.1.mlp.up_proj"], layers_to_transform=None),
        dict(target_modules=["proj", "self_attn.v_proj", "down_proj"], layers_to_transform=[0, 11]),
        dict(target_modules=r".*\.1?[01]\..*_proj", layers_to_transform=None),
    ],
    ids=str,
)
def test_adapters_are_where_peft_has_them(chosen):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = [
        f"model.layers.{layer}.{name}"
        for layer in (0, 1, 11)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    lora = LoraSection(rank=1, **chosen)
    if chosen["target_modules"] != "all-linear":  # which PEFT replaces by a list
        theirs = LoraConfig(**chosen)
        assert [*map(lora.adapts, modules)] == [bool(check_target_module_exists(theirs, name)) for name in modules]
    assert any(map(lora.adapts, modules))


def test_the_scale_of_adapters_is_that_of_peft(tmp_path):
    loaded = load_config(write(tmp_path, SMALLEST), ["lora.rank=16", "lora.alpha=8"]).lora
    assert loaded.scale == 0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.base_storage=nf4"],
            "model.base_storage: nf4 needs frozen weights, but lora.rank is 0; set lora.rank, or choose none",
        ),
        (
            ["lora.sync=adapter"],
            "lora.sync: adapter needs adapters, but lora.rank is 0; set lora.rank, or choose merged",
        ),
        (
            ["lora.rank=4", "lora.sync=adapter", "rollout.dp=2", "rollout.enable_expert_parallel=true"],
            "rollout.dp: 2, but lora.sync is adapter: copies of vLLM drop their adapters while they have no request; set",
        ),
        (
            ["lora.rank=1024", "lora.sync=adapter"],
            "lora.rank: 1024 is above vLLM's limit for adapters, 512; lower lora.rank, or set",
        ),
        (
            [
                *("lora.rank=4", "lora.sync=adapter", "rollout.max_staleness=1", "rollout.placement=dedicated"),
                "algorithm.importance_correction=token_truncate",
            ],
            "rollout.in_flight: keep continues responses with new weights, but lora.sync is adapter: a request keeps its",
        ),
        (
            ["lora.rank=4", "rewards.functions=[{function: rubric, args: {judge: reference}}]"],
            "rewards.functions: args.judge: reference needs the reference's weights below an adapter (lora.rank, ",
        ),
    ],
)
def test_options_of_storage_and_sync_that_contradict_adapters_are_refused(tmp_path, overrides, message):
    _, problem = problems(write(tmp_path, SMALLEST), *overrides)
    assert problem.startswith(message)
