"""The audit's own model of Gemma: transformers' logits, in float64 all the way."""

import pytest
import torch
from tiny_families import MODELS, tiny_model

from megagrpo.audit import naive


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_naive_model_computes_in_float64_what_transformers_computes_in_float32(name, tmp_path):
    model, ids = tiny_model(*MODELS[name]), torch.arange(40) * 3 % 127
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        found = naive.load_model(tmp_path, "float32")(ids[None]).logits
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), model(ids[None]).logits, atol=2e-5, rtol=0)
