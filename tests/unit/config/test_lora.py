"""Invalid settings of adapters, and settings derived from them."""

import pytest

from megagrpo.config import load_config
from tests.unit.config.test_config import SMALLEST, problems, write


@pytest.mark.parametrize(
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
            "debug.dump_steps=[1]",
            "debug.dump_steps: megagrpo audit does not support adapters; leave dump_steps empty, or set lora.rank to 0",
        ),
    ],
)
def test_what_adapters_cannot_do_is_refused(tmp_path, override, message):
    rank = "lora.rank=0" if "adapter_path" in override else "lora.rank=8"
    _, problem = problems(write(tmp_path, SMALLEST), rank, override)
    assert problem.startswith(message)


def test_the_scale_of_adapters_is_that_of_peft(tmp_path):
    loaded = load_config(write(tmp_path, SMALLEST), ["lora.rank=16", "lora.alpha=8"]).lora
    assert (
        loaded.scale == 0.5
        and loaded.model_copy(update=dict(use_rslora=True)).scale == 2.0
        and len(loaded.projections) == 9
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.base_storage=nf4"],
            "model.base_storage: nf4 needs frozen weights, but lora.rank is 0; set lora.rank, or choose none",
        ),
        (
            ["model.base_storage=fp8", "lora.rank=4", "lora.sync=adapter"],
            "lora.sync: adapter leaves vLLM with unrounded weights, but model.base_storage fp8 trains rounded ones",
        ),
        (
            ["lora.sync=adapter"],
            "lora.sync: adapter needs adapters, but lora.rank is 0; set lora.rank, or choose merged",
        ),
        (
            ["lora.rank=1024", "lora.sync=adapter"],
            "lora.rank: 1024 is above vLLM's limit for adapters, 512; lower lora.rank, or set",
        ),
    ],
)
def test_options_of_storage_and_sync_that_contradict_adapters_are_refused(tmp_path, overrides, message):
    _, problem = problems(write(tmp_path, SMALLEST), *overrides)
    assert problem.startswith(message)
