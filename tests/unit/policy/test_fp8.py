"""Products in FP8: refused configs, Megatron's options, and unsupported machines."""

import pytest
import torch

from megagrpo.config import ModelSection, ParallelSection, load_config
from megagrpo.platform import device
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.transformer.transformer_config import keep_in_bf16
from tests.unit.config.test_config import SMALLEST, problems, write
from tests.unit.for_each import for_each


@for_each(
    ("overrides", "message"),
    [
        (
            ["model.bf16_layers=[0, -1]"],
            "model.bf16_layers: [0, -1] only applies with FP8, but model.fp8_recipe is none; choose a recipe",
        ),
        (
            ["model.fp8_param=true"],
            "model.fp8_param: true only applies with FP8, but model.fp8_recipe is none; choose a recipe",
        ),
        (
            ["model.fp8_param=true", "model.fp8_recipe=mxfp8"],
            "model.fp8_param: true does not support model.fp8_recipe mxfp8; choose tensorwise or blockwise",
        ),
        (
            ["model.fp8_param=true", "model.fp8_recipe=blockwise", "model.precision=fp32"],
            "model.fp8_param: true needs float32 masters, but model.precision is fp32, which has no masters; set "
            "model.precision to bf16",
        ),
        (
            ["model.fp8_param=true", "model.fp8_recipe=blockwise", "train.distributed_optimizer=false"],
            "model.fp8_param: true requires train.distributed_optimizer: true",
        ),
        (
            [
                "model.fp8_param=true",
                "model.fp8_recipe=blockwise",
                "train.optimizer=muon",
                "train.distributed_optimizer=false",
            ],
            "model.fp8_param: true needs sharded masters, but train.optimizer muon keeps whole ones; set it to false, "
            "or",
        ),
        (
            [
                "model.fp8_param=true",
                "model.fp8_recipe=blockwise",
                "algorithm.sync_ref_model=true",
                "algorithm.beta=0.1",
            ],
            "model.fp8_param: true rounds away small updates of the reference; set algorithm.sync_ref_model to false",
        ),
        (
            ["model.fp8_recipe=mxfp8", "lora.rank=4", "lora.target_parameters=[experts.down_proj]"],
            "model.fp8_recipe: mxfp8 multiplies experts in groups, without adapters; leave lora.target_parameters "
            "empty, or choose none",
        ),
        (
            ["model.fp8_recipe=blockwise", "lora.rank=4", "model.base_storage=nf4"],
            "model.fp8_recipe: blockwise rounds weights that model.base_storage nf4 has rounded; choose none for one",
        ),
        (
            ["model.fp8_recipe=blockwise", "lora.rank=4", "model.fp8_param=true"],
            "model.fp8_param: true rounds trained weights from masters, but lora.rank freezes them; set it to false",
        ),
    ],
)
def test_options_that_say_nothing_or_contradict_each_other_are_refused(tmp_path, overrides, message):
    _, problem = problems(write(tmp_path, SMALLEST), *overrides)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("recipe", "parallel", "align"),
    [
        ("none", dict(tp=4, cp=2, sequence_parallel=True), 16),
        ("tensorwise", {}, 16),
        ("blockwise", dict(cp=2), 256),
        ("mxfp8", dict(tp=3, cp=2, sequence_parallel=True), 192),
    ],
)
def test_what_a_rank_multiplies_at_once_is_a_multiple_of_what_shares_a_scale(tmp_path, recipe, parallel, align):
    loaded = load_config(write(tmp_path, SMALLEST), [f"model.fp8_recipe={recipe}", f"parallel={parallel}"])
    own = loaded.micro_batch_align / (
        loaded.parallel.cp * (loaded.parallel.tp if loaded.parallel.sequence_parallel else 1)
    )
    assert loaded.micro_batch_align == align and own % loaded.model.token_align == 0
    assert align % (ParallelSection(**parallel).sequence_align) == 0


def section(**keys) -> ModelSection:
    return ModelSection(path="m", **keys)


def test_gradients_get_more_range_where_a_whole_tensor_shares_a_scale():
    auto = {recipe: Fp8.of(section(fp8_recipe=recipe), 2).gradients for recipe in ("tensorwise", "blockwise", "mxfp8")}
    assert auto == {"tensorwise": torch.float8_e5m2, "blockwise": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn}
    assert Fp8.of(section(), 2) is None


def test_layers_count_from_both_ends_and_those_that_are_not_there_are_refused():
    assert Fp8.of(section(fp8_recipe="mxfp8", bf16_layers=[0, -1, 3]), 24).bf16_layers == {0, 3, 23}
    with pytest.raises(
        ValueError, match=r"model\.bf16_layers: -25 is out of range: the model has 24 layers; use -24 to 23"
    ):
        Fp8.of(section(fp8_recipe="mxfp8", bf16_layers=[-25]), 24)


def test_megatron_is_told_where_transformer_engine_multiplies(monkeypatch):
    from megatron.core import fp8_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    fp8 = Fp8("blockwise", hybrid=False)
    assert fp8.megatron_config() == {}
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    assert fp8.megatron_config() == dict(fp8="e4m3", fp8_recipe="blockwise")
    kept = Fp8.of(section(fp8_recipe="blockwise", fp8_param=True), 2)
    assert kept.megatron_config() == dict(fp8="e4m3", fp8_recipe="blockwise", fp8_param=True)
    config = TransformerConfig(
        num_layers=6, hidden_size=8, num_attention_heads=1, **Fp8("tensorwise", hybrid=True).megatron_config()
    )
    keep_in_bf16(config, [0, 1, 4])
    assert config.fp8 == "hybrid" and [fp8_utils.is_first_last_bf16_layer(config, i) for i in range(-1, 6)] == [
        False,
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def test_a_gpu_without_transformer_engine_is_refused_and_a_cpu_is_not(monkeypatch):
    fp8 = Fp8("mxfp8", hybrid=False)
    assert device.fp8_problem("mxfp8") is None
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    with pytest.raises(
        ValueError,
        match=r"model\.fp8_recipe: mxfp8 does not run here: it needs Transformer Engine, which is not installed",
    ):
        fp8.megatron_config()
