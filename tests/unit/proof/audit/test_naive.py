"""The audit's attention for models with special attention: transformers' logits, all in float64."""

import pytest
import torch
from tiny_families import EVERY, family_of, tiny_model

from megagrpo.proof.audit import naive
from tests.family_examples import EXAMPLES

SINKS = ("GptOss", dict(head_dim=24, sliding_window=7, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None))
USUAL = ("gemma2", "gemma3", "gemma4", "qwen3_next", "llama4 multimodal", "mistral3 multimodal", "sinks")


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.full) for name in [*EVERY, "sinks"]]
)
def test_the_naive_model_computes_in_float64_what_transformers_computes_in_float32(name, tmp_path):
    model, ids = tiny_model(*(SINKS if name == "sinks" else EVERY[name])), torch.arange(40) * 3 % 127
    tolerance = 2e-5 if name == "sinks" else 2 * EXAMPLES[family_of(name).model_type].tolerance
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        found = naive.load_model(tmp_path, "float32")(ids[None]).logits
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), model(ids[None]).logits, atol=tolerance, rtol=0)
