"""Every quantity of a dumped step beside its recomputed twin, in the order in which the step makes them: the first that differs is where
to look."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.audit import naive, naive_advantages, naive_loss
from megagrpo.audit.recompute import Recomputed, recompute
from megagrpo.audit.saved import Sample, Step, Update
from megagrpo.config import RewardsSection
from megagrpo.data.tokenizer import Tokenizer, load_tokenizer
from megagrpo.rewards.registry import REPEATABLE, display_names
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Dialogue, Prompt, Rollout

EXACT = 0.0
ROUNDING = 1e-6  # of one number stored in float32
SUMMING = 1e-5  # of the mean of many


@dataclass(frozen=True)
class Tolerances:
    """How far a run may be from float64: log-probs, entropy and exact KL of one token, and on average over tokens, in nats; the loss
    relative to its tokens' mean absolute value; the gradient norm relative."""

    token: float
    average: float
    loss: float
    grad_norm: float


TOLERANCES = {
    "float32": Tolerances(token=2e-4, average=2e-5, loss=2e-5, grad_norm=1e-4),
    "bfloat16": Tolerances(token=0.5, average=0.1, loss=0.02, grad_norm=0.05),
}


@dataclass(frozen=True)
class Check:
    """One quantity: how many numbers were compared, and of the one that is furthest off (by its tolerance) the place, both values, their
    difference and what was allowed; the `average` difference, and what was allowed where it is limited too. `note` says how it was
    compared where that is a choice."""

    quantity: str
    count: int
    passed: bool
    difference: float
    allowed: float
    place: str = ""
    dumped: float | str = 0.0
    recomputed: float | str = 0.0
    average: float = 0.0
    average_allowed: float | None = None
    note: str = ""


def check_step(step: Step) -> Iterator[Check]:
    """All checks of a step, in order, as they are done: the costly ones come last."""
    yield _tokens(step)
    if len(step.updates) > 1:
        yield _slices(step)
    yield from (_masks(step, update) for update in step.updates)
    table, weights, check = _rewards(step)
    yield check
    if step.config.algorithm.kl_in_reward:
        table, weights = _with_kl(step, table), [*weights, -step.config.algorithm.beta]
    advantages = naive_advantages.advantages(table, weights, step.config.rollout.num_generations, step.config.algorithm)
    dumped = [float(s.text["advantage"]) for s in step.samples]
    yield compare("advantages", dumped, advantages, ROUNDING, lambda i: f"sample {i}")
    rows = [_Rows(step, update) for update in step.updates]
    for of in rows:
        yield of.compare(
            "advantages in the batch", "advantage", [torch.full((s.length,), a) for s, a in zip(step.samples, advantages, strict=True)]
        )
        yield of.compare("rollout log-probs", "rollout_logprobs", [s.rollout_logprobs for s in step.samples])
    for of, result in zip(rows, recompute(step, advantages), strict=True):
        yield from _numbers(step, of, result)


def compare(
    quantity: str,
    dumped: Sequence[float] | Tensor,
    recomputed: Sequence[float] | Tensor,
    tolerance: float,
    place: Callable[[int], str],
    size: float = 1.0,
    average: float | None = None,
    note: str = "",
) -> Check:
    """Numbers pairwise. Allowed is `tolerance` times `size`, or times the recomputed number where that is larger; `average` limits the mean
    difference. NaN equals NaN only."""
    found, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (dumped, recomputed))
    if not expected.numel():
        return Check(quantity, 0, True, 0.0, tolerance * size, note=note)
    difference = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0.0, (found - expected).abs()).nan_to_num(
        nan=math.inf
    )
    allowed = tolerance * torch.clamp(expected.abs(), min=size).nan_to_num(nan=size, posinf=size)
    worst = int((difference - allowed).argmax())
    mean = difference.mean().item()
    passed = bool((difference <= allowed).all()) and (average is None or mean <= average)
    values = difference[worst].item(), allowed[worst].item(), place(worst), found[worst].item(), expected[worst].item()
    return Check(quantity, expected.numel(), passed, *values, mean, average, note)


def _tokens(step: Step) -> Check:
    """Lengths within their limits, endings that fit their reasons, text that is the tokens' text, and the batch's tokens those sampled."""
    tokenizer, note = _tokenizer(step)
    problems = [(problem, f"sample {i}") for i, sample in enumerate(step.samples) for problem in _sample_problems(sample, step, tokenizer)]
    for update in step.updates:
        for sample, token, token_id in zip(*(update.rows[name].tolist() for name in ("sample", "token", "token_id")), strict=True):
            if 0 <= sample < len(step.samples) and 0 <= token < step.samples[sample].length:
                if (expected := int(step.samples[sample].token_ids[token])) != token_id:
                    problems.append((f"trained on {token_id}, sampled {expected}", f"sample {sample} token {token}"))
    return _listed("tokens", sum(s.length for s in step.samples), problems, note)


def _tokenizer(step: Step) -> tuple[Tokenizer | None, str]:
    try:
        return load_tokenizer(step.config.model.tokenizer or step.model, step.model), "text decoded again"
    except ValueError as error:
        return None, f"text not decoded: {error}"


def _sample_problems(sample: Sample, step: Step, tokenizer: Tokenizer | None) -> Iterator[str]:
    rollout, response, reason = step.config.rollout, sample.token_ids[sample.prompt_length :].tolist(), sample.text["finish_reason"]
    if sample.prompt_length > rollout.max_prompt_length:
        yield f"a prompt of {sample.prompt_length} tokens, rollout.max_prompt_length {rollout.max_prompt_length}"
    if not 0 < len(response) <= step.config.max_response_length:
        yield f"a response of {len(response)} tokens, {step.config.response_limit}"
    if reason == "length" and len(response) != rollout.max_completion_length and sample.text["dialogue"] is None:
        yield f"cut after {len(response)} tokens, rollout.max_completion_length {rollout.max_completion_length}"
    if tokenizer is None or not response:
        return
    if reason == "stop" and response[-1] not in tokenizer.eos_token_ids:
        yield f"ended with token {response[-1]}, which ends nothing"
    if tokenizer.decode(response) != sample.text["response"]:
        yield "the text is not that of the tokens"


def _slices(step: Step) -> Check:
    """The optimizer steps of each iteration train on every sample once."""
    width, everyone = step.config.algorithm.steps_per_generation, range(len(step.samples))
    problems = []
    for start in range(0, len(step.updates), width):
        trained = Counter(i for update in step.updates[start : start + width] for i in update.samples)
        wrong = [i for i in everyone if trained[i] != 1]
        problems += [(f"in {trained[i]} optimizer steps of iteration {start // width + 1}", f"sample {i}") for i in wrong]
    return _listed("samples", len(everyone) * (len(step.updates) // width), problems)


def _masks(step: Step, update: Update) -> Check:
    """Loss tokens are those that the policy wrote, each once; of samples that teach nothing none, where they are left out."""
    left_out = step.config.algorithm.leaves_out_zero_advantage
    expected = {
        (i, token)
        for i, sample in enumerate(step.samples)
        if i in update.samples and not (step.is_masked(sample) or (left_out and float(sample.text["advantage"]) == 0))
        for token in sample.places.tolist()
    }
    found = Counter(zip(update.rows["sample"].tolist(), update.rows["token"].tolist(), strict=True))
    problems = [("not in the loss", place) for place in sorted(expected - found.keys())]
    problems += [("in the loss by mistake", place) for place in sorted(found.keys() - expected)]
    problems += [(f"in the loss {times} times", place) for place, times in sorted(found.items()) if times > 1 and place in expected]
    named = [(problem, f"sample {sample} token {token}") for problem, (sample, token) in problems]
    return _listed(_name("masks", step, update), len(expected), named)


def _with_kl(step: Step, table: list[list[float | None]]) -> list[list[float | None]]:
    """One more reward for each sample that has any: the sum of log(old / reference) over its tokens, from the dumped rows, which have
    checks of their own."""
    kl = [0.0] * len(table)
    for update in step.updates[: step.config.algorithm.steps_per_generation]:
        log_ratios = update.rows["old_logprobs"].double() - update.rows["ref_logprobs"].double()
        for sample, log_ratio in zip(update.rows["sample"].tolist(), log_ratios.tolist(), strict=True):
            kl[sample] += log_ratio
    return [[*row, None if all(value is None for value in row) else of] for row, of in zip(table, kl, strict=True)]


def _listed(quantity: str, count: int, problems: list[tuple[str, str]], note: str = "") -> Check:
    """A check of yes and no: the difference is how many are wrong, of which the first is shown."""
    first, place = problems[0] if problems else ("", "")
    return Check(quantity, count, not problems, float(len(problems)), EXACT, place, first, "", note=note)


def _rewards(step: Step) -> tuple[list[list[float | None]], list[float], Check]:
    """The rewards of each sample by function, with their weights; of functions that are not ours, or ask somebody, the dumped ones."""
    functions = step.config.rewards.functions
    names = display_names(functions)
    again = [i for i, f in enumerate(functions) if f.function in REPEATABLE]
    values = [[s.text["rewards"][name] for name in names] for s in step.samples]
    pairs: list[tuple[float | None, float | None, str]] = []  # dumped, recomputed, place
    if again:
        section = RewardsSection(functions=[functions[i] for i in again], timeout=step.config.rewards.timeout, workers=1)
        with RewardScorer(section, step.config.rollout.max_completion_length) as scorer:
            for sample, (row, scored) in enumerate(zip(values, scorer.score([_rollout(s) for s in step.samples]), strict=True)):
                for i, value in zip(again, scored.rewards.values(), strict=False):  # then those of turns
                    pairs.append((row[i], value, f"sample {sample} {names[i]}"))
                    row[i] = value
    weights = [f.weight for f in functions]
    turns = [list(s.text["dialogue"]["rewards"].values()) if s.text["dialogue"] else [] for s in step.samples]
    values, weights = [row + own for row, own in zip(values, turns, strict=True)], weights + [1.0] * len(turns[0])
    summed = [naive_advantages.weighted_sum(row, weights) for row in values]
    pairs += [(float(s.text["reward"]), reward, f"sample {i}") for i, (s, reward) in enumerate(zip(step.samples, summed, strict=True))]
    kept = [name for i, name in enumerate(names) if i not in again]
    said = [f"run again: {', '.join(names[i] for i in again)}"] if again else []
    said += [f"weighted sum of what is dumped: {', '.join(kept)}"] if kept else []
    dumped, recomputed = ([math.nan if pair[side] is None else pair[side] for pair in pairs] for side in (0, 1))
    return values, weights, compare("rewards", dumped, recomputed, ROUNDING, lambda i: pairs[i][2], note="; ".join(said))


def _rollout(sample: Sample) -> Rollout:
    text, ids = sample.text, tuple(sample.token_ids.tolist())
    prompt = Prompt(text["prompt_id"], ids[: sample.prompt_length], text["prompt"], text["columns"])
    response, dialogue = ids[sample.prompt_length :], None
    if text["dialogue"] is not None:
        written = torch.zeros(sample.length, dtype=torch.bool).index_fill(0, sample.places, True)[sample.prompt_length :]
        dialogue = Dialogue(tuple(written.tolist()), **text["dialogue"])
    zeros = (0.0,) * len(response)
    return Rollout(prompt, response, zeros, text["finish_reason"], text["weight_version"], text["response"], dialogue)


class _Rows:
    """The rows of one optimizer step that speak of a token of some sample; others are the masks' matter."""

    def __init__(self, step: Step, update: Update):
        self.step, self.update = step, update
        sample, token = update.rows["sample"].long(), update.rows["token"].long()
        lengths = torch.tensor([s.length for s in step.samples])
        self._valid = (sample >= 0) & (sample < len(lengths)) & (token >= 0) & (token < lengths[sample.clamp(0, len(lengths) - 1)])
        self.sample, self.token = sample[self._valid], token[self._valid]
        self._place = (lengths.cumsum(0) - lengths)[self.sample] + self.token

    def dumped(self, name: str) -> Tensor | None:
        return self.update.rows[name][self._valid].double() if name in self.update.rows else None

    def recomputed(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Rows [L] or [Lr] of each sample at the tokens of these rows; NaN where there is none."""
        whole = []
        for sample, row in zip(self.step.samples, rows, strict=True):
            filled = torch.full((sample.length,), math.nan, dtype=torch.float64)
            if row is not None:
                filled = row.double() if row.numel() == sample.length else filled.index_copy(0, sample.places, row.double())
            whole.append(filled)
        return torch.cat(whole)[self._place]

    def ratio(self, log_ratio: Tensor) -> Tensor:
        """The probability ratio of these tokens as the loss takes it."""
        ratio = torch.empty_like(log_ratio)
        for sample in self.sample.unique():
            mine = self.sample == sample
            ratio[mine] = naive_loss.probability_ratio(log_ratio[mine], self.step.config.algorithm.importance_sampling_level)
        return ratio

    def compare(self, quantity: str, name: str, rows: Sequence[Tensor | None], tolerance: float = ROUNDING, average: float | None = None):
        """The check of one kind of row."""
        quantity = _name(quantity, self.step, self.update)
        return compare(quantity, self.dumped(name), self.recomputed(rows), tolerance, self._where, average=average)

    def _where(self, i: int) -> str:
        return f"sample {int(self.sample[i])} token {int(self.token[i])}"


def _numbers(step: Step, rows: _Rows, result: Recomputed) -> Iterator[Check]:
    """What the model computed, token by token and as a whole."""
    tolerances, update = TOLERANCES[step.dtype], rows.update
    for quantity, name, recomputed in (
        ("policy log-probs", "policy_logprobs", result.policy_logprobs),
        ("old log-probs", "old_logprobs", result.old_logprobs),
        ("reference log-probs", "ref_logprobs", result.ref_logprobs),
        ("entropy", "entropy", result.entropy),
        ("full-vocabulary KL", "full_kl", result.kl),
    ):
        if rows.dumped(name) is not None:
            yield rows.compare(quantity, name, recomputed, tolerances.token, tolerances.average)

    def single(quantity: str, dumped: float, recomputed: float, tolerance: float, size: float = 1.0) -> Check:
        return compare(_name(quantity, step, update), [dumped], [recomputed], tolerance, lambda _: "", size)

    for name, value in _means(rows).items():
        yield single(f"mean {name}", update.metric(name), value, SUMMING)
    yield single("denominator", update.denominator, _denominator(step, update), EXACT)
    yield single("loss", update.metric("loss"), result.loss, tolerances.loss, result.loss_size)
    yield single("grad_norm", update.metric("grad_norm"), result.grad_norm, tolerances.grad_norm, 0.0)


def _means(rows: _Rows) -> dict[str, float]:
    """Metrics that are means over the loss tokens, under the names they have in metrics.jsonl, from the dumped rows: whether the ranks'
    sums came together."""
    if not rows.sample.numel():
        return {}
    policy, old, ref, full_kl = (rows.dumped(name) for name in ("policy_logprobs", "old_logprobs", "ref_logprobs", "full_kl"))
    old = policy if old is None else old
    means = naive.mismatch(old, rows.dumped("rollout_logprobs")) | {"entropy": rows.dumped("entropy").mean().item()}
    algorithm, entropy = rows.step.config.algorithm, rows.dumped("entropy")
    if algorithm.top_entropy_quantile < 1:
        threshold = naive_loss.top_threshold(entropy.tolist(), algorithm.top_entropy_quantile)
        means["entropy/top"] = entropy[entropy >= threshold - ROUNDING].mean().item()
    if ref is not None and not algorithm.kl_in_reward:
        full_kl = naive.estimated_kl(ref - policy, rows.ratio(policy - old), algorithm)
    return means if full_kl is None else {"kl": full_kl.mean().item()} | means


def _denominator(step: Step, update: Update) -> int:
    return naive_loss.denominator(step.loss_lengths(update), step.config.algorithm.loss_type, step.config.rollout.max_completion_length)


def _name(quantity: str, step: Step, update: Update) -> str:
    return quantity if len(step.updates) == 1 else f"{quantity}, optimizer step {update.number}"
