"""The audit's attention for models with special attention: transformers' logits, all in float64."""

import pytest
import torch
from tiny_families import MODELS, tiny_model

from megagrpo.proof.audit import naive

SINKS = ("GptOss", dict(head_dim=24, sliding_window=7, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None))


@pytest.mark.parametrize("model", [MODELS["gemma2"], MODELS["gemma3"], SINKS], ids=["gemma2", "gemma3", "sinks"])
def test_the_naive_model_computes_in_float64_what_transformers_computes_in_float32(model, tmp_path):
    model, ids = tiny_model(*model), torch.arange(40) * 3 % 127
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        found = naive.load_model(tmp_path, "float32")(ids[None]).logits
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), model(ids[None]).logits, atol=2e-5, rtol=0)
