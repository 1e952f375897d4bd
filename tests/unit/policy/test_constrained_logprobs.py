"""Log-probs of structured outputs, bad words and allowed tokens on a tiny vocabulary, of trainer and audit, against a
softmax over tokens that an enumeration of all texts allows."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch
from megagrpo.data.tokens.grammar import Grammars
from megagrpo.data.tokens.sampling import forbidden_token, own_sampling
from megagrpo.policy.lm_head.logit_processors import LogitProcessors, runs_of
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.train_types import TrainSample
from megagrpo.types import SamplingParams
from tests.unit.data.test_grammar import IDS, LETTERS, VOCABULARY, character_tokenizer, encode

END = LETTERS.index("~")
RUN = SamplingParams(1.0, 9, (END,))
ROWS = [
    ({"structured_outputs": {"regex": "[ab]{2,3}c?"}, "temperature": 0.7}, "abac~"),
    ({"structured_outputs": {"choice": ["yes", "no", "nob"]}}, "no~"),
    ({"logit_bias": {"3": 2.0}}, "acaa~"),
    ({"allowed_token_ids": [0, 1, END]}, "abba~"),
    ({}, "xyz~"),
    ({"structured_outputs": {"regex": "(ab|ba)+"}}, "abab~"),
]


def parameters(own):
    return own_sampling(RUN, own)


def texts_of(own):
    """All texts of up to seven letters that a row allows, or None if it has no constraint."""
    constraint = own.get("structured_outputs", {})
    every = ["".join(word) for n in range(8) for word in itertools.product("abc", repeat=n)]
    if "regex" in constraint:
        every = [word for word in every if re.fullmatch(constraint["regex"], word)]
    return constraint.get("choice", every if constraint else None)


def brute_force(own, before):
    """The tokens that may follow the text `before`, found by trying each of them."""
    texts, kept = texts_of(own), []
    for letter in LETTERS:
        after = before + letter
        whole = after[:-1] if letter == "~" else None
        if texts is not None and not (whole in texts if whole is not None else any(t.startswith(after) for t in texts)):
            continue
        if IDS[letter] in own.get("allowed_token_ids", range(VOCABULARY)):
            kept.append(IDS[letter])
    constrained = texts is not None or "allowed_token_ids" in own
    return kept if constrained else kept + list(range(len(LETTERS), VOCABULARY))


def sample(index, text, prompt="hi ab"):
    """A response after a prompt that ends with the beginning of a bad word, which does not count."""
    ids = torch.from_numpy(encode(prompt + text))
    return TrainSample(ids, torch.arange(ids.numel()) >= len(prompt), torch.zeros(ids.numel()), 1.0, index=index)


def expected(logits, own, text):
    rows = []
    for row, place in zip(logits.double(), range(len(text)), strict=True):
        kept = brute_force(own, text[:place])
        for token, added in own.get("logit_bias", {}).items():
            row = row + added * torch.eye(VOCABULARY, dtype=row.dtype)[int(token)]
        row = row / own.get("temperature", 1)
        rows.append(row[IDS[text[place]]] - row[kept].logsumexp(0))
    return torch.stack(rows)


@pytest.mark.parametrize("share", [False, True], ids=["own prompts", "shared prompts"])
def test_trainer_and_audit_are_over_the_tokens_that_brute_force_allows(share):
    samples = [sample(i, text) for i, (_, text) in enumerate(ROWS)]
    batch = build_micro_batch(samples, PackingRules(1000, share_prompts=share))
    places = batch.loss_mask.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(places.numel(), 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    of_sequences = [parameters(ROWS[i][0]) for i in batch.samples.tolist()]
    temperature = torch.tensor([of_sequences[s].temperature for s in batch.sequence_index[places].tolist()])
    grammars = Grammars(character_tokenizer, VOCABULARY)
    processors = LogitProcessors(tuple(runs_of(batch, places, of_sequences)), grammars)
    task = HeadTask(batch.labels[places], temperature=temperature.double(), processors=processors, chunk=3)
    logprobs, _ = vocab_logprobs(hidden, weight, task)
    logits, begin = hidden @ weight.t(), 0
    for made, (own, text) in zip(samples, ROWS, strict=True):
        mine = slice(begin, begin + len(text))
        right = expected(logits[mine], own, text)
        torch.testing.assert_close(logprobs[mine], right, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(audited(made, logits[mine], parameters(own), grammars), right, rtol=1e-9, atol=1e-9)
        begin = mine.stop


def audited(made, logits, sampling, grammars):
    """The audit's log-probs of a model with these logits at the response."""
    from megagrpo.proof.audit import naive
    from megagrpo.proof.audit.recompute import _allowed

    places = made.response_mask.nonzero()[:, 0]
    every = torch.zeros(1, made.token_ids.numel(), VOCABULARY, dtype=torch.float64)
    every[0, places - 1] = logits
    place = SimpleNamespace(places=places, token_ids=made.token_ids)
    may_follow = None if sampling.constraint is None else _allowed(grammars, sampling.constraint, place)
    model = lambda ids: SimpleNamespace(logits=every)  # noqa: E731
    rows = naive.log_softmax(model, made.token_ids, places, sampling, None, may_follow)
    return rows.gather(1, made.token_ids[places, None])[:, 0]


def test_a_response_with_a_forbidden_token_is_found():
    few = parameters({"allowed_token_ids": [0, END]})
    assert forbidden_token(few, encode("aa~").tolist()) is None
    assert forbidden_token(few, np.array(encode("ab~")).tolist()) == 1
    assert forbidden_token(RUN, [1, 2]) is None
