"""What the section of adapters refuses, and what follows from it."""

import pytest

from megagrpo.config import load_config
from tests.unit.config.test_config import SMALLEST, problems, write


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.target_modules=[q_proj, lm_head]", "lora.target_modules: lm_head: embeddings and LM head have none; choose all-linear or"),
        ("lora.target_modules=query", "lora.target_modules: query: no such projection; choose all-linear or a list of q_proj, k_proj"),
        ("lora.target_modules=[]", "lora.target_modules: names nothing to train; choose all-linear"),
        ("lora.adapter_path=there", "lora.adapter_path: there needs lora.rank, the rank it was made with; set it"),
        ("debug.dump_steps=[1]", "debug.dump_steps: megagrpo audit knows no adapters; leave it empty, or set lora.rank to 0"),
    ],
)
def test_what_adapters_cannot_do_is_refused(tmp_path, override, message):
    rank = "lora.rank=0" if "adapter_path" in override else "lora.rank=8"
    _, problem = problems(write(tmp_path, SMALLEST), rank, override)
    assert problem.startswith(message)


def test_the_scale_of_adapters_is_that_of_peft(tmp_path):
    loaded = load_config(write(tmp_path, SMALLEST), ["lora.rank=16", "lora.alpha=8"]).lora
    assert loaded.scale == 0.5 and loaded.model_copy(update=dict(use_rslora=True)).scale == 2.0 and len(loaded.projections) == 9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.base_storage=nf4"], "model.base_storage: nf4 is for weights that are not trained; set lora.rank, or choose none"),
        (
            ["model.base_storage=fp8", "lora.rank=4", "lora.sync=adapter"],
            "lora.sync: vLLM's own weights are not those of model.base_storage",
        ),
        (["lora.sync=adapter"], "lora.sync: there are no adapters to send; set lora.rank, or choose merged"),
        (["lora.rank=1024", "lora.sync=adapter"], "lora.rank: vLLM takes adapters up to rank 512; lower it, or set lora.sync to merged"),
    ],
)
def test_options_of_storage_and_sync_that_contradict_adapters_are_refused(tmp_path, overrides, message):
    _, problem = problems(write(tmp_path, SMALLEST), *overrides)
    assert problem.startswith(message)
