"""The audit's attention for models with special attention: transformers' logits, all in float64."""

import pytest
import torch
from tiny_families import EVERY, family_of, tiny_model

from megagrpo.policy.lm_head.vocab_shard import VocabShard
from megagrpo.policy.lm_head.vocab_truncation import lowest_kept
from megagrpo.proof.audit import naive
from megagrpo.types import Truncation
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


def kept_by_trainer(logits, rules):
    """The tokens that the trainer keeps, in the dtype of the logits."""
    shard = VocabShard(None, 0, logits.shape[1])
    return logits >= lowest_kept(logits, shard, rules)[:, None]


def at_the_edge(rows, size, rule):
    """Logits [rows, size] float64, and rules that a token fulfils or misses by less than float32 can tell."""
    logits = 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ordered = logits.sort(-1, descending=True).values
    if rule == "top_k":  # the sixth and the seventh differ by half of float32's rounding
        seventh = logits.argsort(-1, descending=True)[:, 6:7]
        return logits.scatter(1, seventh, ordered[:, 5:6] - 5e-8), [Truncation(top_k=6)] * rows
    if rule == "min_p":
        return logits, [Truncation(min_p=float((row[5] - row[0]).exp())) for row in ordered]
    return logits, [Truncation(top_p=float(row.softmax(-1)[:6].sum())) for row in ordered]


@pytest.mark.parametrize("rule", ["top_p", "top_k", "min_p"])
def test_at_the_edge_of_the_kept_set_the_audit_takes_the_set_that_the_run_reports(rule):
    """Otherwise the rounding of the run's CPU decides whether the audit of a right run passes."""
    logits, rules = at_the_edge(200, 50, rule)
    differ = 0
    for row, of_row in zip(logits[:, None], rules, strict=True):
        own = row.argmax(-1, keepdim=True)
        sets = [kept_by_trainer(row.float() + shift, of_row) for shift in (0, 1e-6 * torch.randn(50))]
        sets += [naive._kept(row, of_row, own, None)]
        differ += any(not one.equal(sets[0]) for one in sets)
        for one in sets:
            reported = row.masked_fill(~one, -1e30).log_softmax(-1).gather(1, own)[:, 0]
            kept = naive._kept(row, of_row, own, reported.float().double())
            # two tokens at the edge may change places
            torch.testing.assert_close(row[kept].sort().values, row[one].sort().values, rtol=0, atol=1e-5)
    assert differ > 20


def test_far_from_the_edge_a_wrong_report_changes_nothing():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    for rules, count in ((Truncation(top_k=2), 2), (Truncation(top_p=0.7), 2), (Truncation(min_p=0.3), 2)):
        for reported in (-0.1, -5.0):
            kept = naive._kept(logits, rules, torch.tensor([[0]]), torch.tensor([reported], dtype=torch.float64))
            assert kept.sum() == count


def test_an_excluded_token_is_kept_by_no_rule():
    logits = torch.tensor([[1.0, -1e30 / 1.7, 0.5, -1e30]], dtype=torch.float64)
    kept = naive._kept(logits, Truncation(top_k=3), torch.tensor([[0]]), None)
    assert kept.tolist() == [[True, False, True, False]]
