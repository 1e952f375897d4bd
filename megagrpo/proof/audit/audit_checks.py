"""Compares every quantity of a dumped step with its recomputed value, in the order in which the step computes them. The
first difference shows where to look."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from megagrpo.config import RewardFunction, RewardsSection
from megagrpo.data.tokens.tokenizer import Tokenizer, tokenizer_of
from megagrpo.proof.audit import naive_advantages, naive_critic, naive_loss, naive_tokens, naive_turns
from megagrpo.proof.audit.audit_compare import (
    NO_TOLERANCE,
    ROUNDING_TOLERANCE,
    SUMMING_TOLERANCE,
    Check,
    compare,
    named,
)
from megagrpo.proof.audit.dumped_rows import Rows, means
from megagrpo.proof.audit.naive_loss import check_custom_loss, note
from megagrpo.proof.audit.recompute import Recomputed, recompute
from megagrpo.proof.audit.saved import DumpedUpdate, Sample, Step
from megagrpo.proof.audit.tolerances import TOLERANCES
from megagrpo.proof.audit.update_checks import check_update
from megagrpo.rewards.registry.target import REPEATABLE
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Dialogue, Prompt, Rollout


def check_step(step: Step) -> Iterator[Check]:
    """Yield a step's checks in order, expensive ones last. Raises ConfigError when the run's own loss is gone."""
    check_custom_loss(step.config.algorithm)
    yield _tokens(step)
    if len(step.updates) > 1:
        yield _slices(step)
    yield from (named(_masks(step, update), step, update) for update in step.updates)
    table, weights, check = _rewards(step)
    yield check
    rows = [Rows(step, update) for update in step.updates]
    if step.config.algorithm.has_critic:
        rewards = [naive_advantages.weighted_sum(row, weights) for row in table]
        spread = yield from naive_critic.check_critic(step, rewards, rows)
    else:
        spread = yield from _check_advantages(step, table, weights, rows)
    for of in rows:
        sampled = [s.rollout_logprobs for s in step.samples]
        yield named(of.compare("rollout log-probs", "rollout_logprobs", sampled), step, of.update)
    for of, result in zip(rows, recompute(step, spread), strict=True):
        for check in chain(_numbers(step, of, result), check_update(step, of.update, result)):
            yield named(check, step, of.update)


def _check_advantages(
    step: Step, table: list[list[float | None]], weights: list[float], rows: list[Rows]
) -> Generator[Check, None, list[Tensor]]:
    """Yield the checks of advantages that compare these rewards by function. Returns the advantages [L] float64 of each
    sample."""
    algorithm = step.config.algorithm
    if algorithm.kl_in_reward:
        table, weights = _with_kl(step, table), [*weights, -algorithm.beta]
    rewards = [naive_advantages.weighted_sum(row, weights) for row in table]
    if algorithm.advantage_by_tokens:
        rewards = naive_tokens.outcomes(step)
        advantages = _advantages(step, [[r] for r in rewards], [1.0])
    else:
        advantages = _advantages(step, table, weights)
    if algorithm.own_estimator and not algorithm.advantage_by_turns:
        advantages = naive_turns.estimated(step, table, rewards).tolist()
    dumped = [float(s.text["advantage"]) for s in step.trajectories]
    if step.has_roles:
        dumped = [float(s.text["advantage"]) for s in step.samples]
        advantages = naive_turns.role_advantages(step, table, lambda rows: _of_rows(step, rows, weights))
    yield compare("advantages", dumped, advantages, ROUNDING_TOLERANCE, lambda i: f"sample {i}")
    of_turns = None
    if algorithm.advantage_by_turns:
        of_turns = naive_turns.turn_advantages(step, advantages)
        if algorithm.own_estimator:
            lengths = [len(row) for row in of_turns]
            of_turns = [part.tolist() for part in naive_turns.estimated(step, table, rewards).split(lengths)]
        yield _turn_advantages(step, of_turns)
    spread = _spread(step, advantages, of_turns)
    for of in rows:
        yield named(of.compare("advantages in the batch", "advantage", spread), step, of.update)
    return spread


def _of_rows(step: Step, rows: list[list[float | None]], weights: list[float]) -> list[float]:
    """Return the advantages of rows of rewards, by the run's own estimator if it has one."""
    if step.config.algorithm.own_estimator:
        summed = [naive_advantages.weighted_sum(row, weights) for row in rows]
        return list(naive_turns.estimated(step, rows, summed).tolist())
    return _advantages(step, rows, weights)


def _spread(step: Step, advantages: list[float], of_turns: list[list[float]] | None) -> list[Tensor]:
    """Return the advantage [L] float64 of each token of each sample."""
    if step.config.algorithm.advantage_by_tokens:
        return naive_tokens.token_advantages(step, advantages)
    if step.has_roles:
        return [torch.full((s.length,), a, dtype=torch.float64) for s, a in zip(step.samples, advantages, strict=True)]
    return naive_turns.spread(step, advantages, of_turns)


def _turn_advantages(step: Step, recomputed: list[list[float]]) -> Check:
    """Compare the advantages of all turns."""
    dumped = [list(map(float, s.text["turn_advantages"])) for s in step.trajectories]
    places = [f"trajectory {t} turn {i}" for t, row in enumerate(recomputed) for i in range(len(row))]
    flat = list(chain(*dumped)), list(chain(*recomputed))
    return compare("turn advantages", flat[0], flat[1], ROUNDING_TOLERANCE, places.__getitem__)


def _tokens(step: Step) -> Check:
    """Compare lengths to limits, finish reasons to endings, text to tokens, and batch tokens to sampled ones."""
    tokenizer, note = _tokenizer(step)
    problems = [
        (problem, f"sample {i}")
        for i, sample in enumerate(step.samples)
        for problem in _sample_problems(sample, step, tokenizer)
    ]
    for update in step.updates:
        for sample, token, token_id in zip(
            *(update.rows[name].tolist() for name in ("sample", "token", "token_id")), strict=True
        ):
            if 0 <= sample < len(step.samples) and 0 <= token < step.samples[sample].length:
                if (expected := int(step.samples[sample].token_ids[token])) != token_id:
                    problems.append((f"trained on {token_id}, sampled {expected}", f"sample {sample} token {token}"))
    return _listed("tokens", sum(s.length for s in step.samples), problems, note)


def _tokenizer(step: Step) -> tuple[Tokenizer | None, str]:
    try:
        return tokenizer_of(step.config, step.model), "text decoded again"
    except ValueError as error:
        return None, f"text not decoded: {error}"


def _sample_problems(sample: Sample, step: Step, tokenizer: Tokenizer | None) -> Iterator[str]:
    rollout, reason = step.config.rollout, sample.text["finish_reason"]
    response = sample.token_ids[sample.prompt_length :].tolist()
    # the context of a branch has earlier responses in it; an agent's messages and their answers share one limit
    asks_itself = step.config.multi_turn.agent is not None
    if not sample.is_branch and not asks_itself and sample.prompt_length > rollout.max_prompt_length:
        yield f"a prompt of {sample.prompt_length} tokens, rollout.max_prompt_length {rollout.max_prompt_length}"
    if not 0 < len(response) <= step.config.max_response_length:
        yield f"a response of {len(response)} tokens, {step.config.response_limit}"
    limit = sample.sampling.get("max_tokens", rollout.max_completion_length)
    if reason == "length" and len(response) != limit and sample.text["dialogue"] is None:
        said = "max_tokens of its row" if "max_tokens" in sample.sampling else "rollout.max_completion_length"
        yield f"cut after {len(response)} tokens, {said} {limit}"
    turns = [token for row in naive_turns.spans(sample) for token in range(row["start"], row["stop"])]
    forced = {token for span in sample.text.get("forced") or () for token in range(*span)}
    turns = turns if sample.text["dialogue"] else [*range(len(response))]
    own = [token - sample.prompt_length for token in sample.places.tolist()]
    if turns and [token for token in turns if token not in forced] != own:
        yield "the policy's turns are other tokens than those that it wrote"
    if tokenizer is not None and response:
        yield from _text_problems(sample, response, step, tokenizer)


def _text_problems(sample: Sample, response: list[int], step: Step, tokenizer: Tokenizer) -> Iterator[str]:
    rollout = step.config.rollout
    text, turn = tokenizer.decode(response), _last_turn(sample, response)
    strings = [*rollout.stop, *sample.sampling.get("stop", [])]
    for start, end in sample.text.get("forced") or ():
        if tokenizer.thinking is None or tuple(response[start:end]) != tokenizer.thinking.end_ids:
            yield f"tokens {start} to {end - 1} are not those of rollout.thinking_end"
    stop, end = _first_stop(last := tokenizer.decode(turn), strings)
    if sample.text["finish_reason"] == "stop" and response[-1] not in tokenizer.eos_token_ids and not stop:
        no_stop = " and completes no stop string" if strings else ""
        yield f"ended with token {response[-1]}, which is not an end token{no_stop}"
    if stop and _first_stop(tokenizer.decode(turn[:-1]), strings)[0]:
        yield f"has tokens after the stop string {stop!r}"
    if stop and sample.text["dialogue"] is None:
        end -= 0 if rollout.include_stop_str_in_output else len(stop)
        text = text[: len(text) - len(last) + end]
    if text != sample.text["response"]:
        yield "the text differs from the decoded tokens"


def _last_turn(sample: Sample, response: list[int]) -> list[int]:
    """Return the tokens of the policy's last turn: those after the last token that the policy did not write."""
    own = set(sample.places.tolist())
    start = max((i + 1 for i in range(len(response)) if sample.prompt_length + i not in own), default=0)
    return response[start:]


def _first_stop(text: str, stop: list[str]) -> tuple[str, int]:
    """Return the stop string that is complete first, and where it ends; ("", 0) without one."""
    ends = [(text.index(string) + len(string), string) for string in stop if string in text]
    end, string = min(ends, key=lambda pair: pair[0], default=(0, ""))
    return string, end


def _slices(step: Step) -> Check:
    """Check that the optimizer steps of each iteration train on every sample once."""
    width = step.config.algorithm.steps_per_generation
    everyone = [i for i, sample in enumerate(step.samples) if not step.is_frozen(sample)]
    problems = []
    for start in range(0, len(step.updates), width):
        trained = Counter(i for update in step.updates[start : start + width] for i in update.samples)
        wrong = [i for i in everyone if trained[i] != 1]
        problems += [
            (f"in {trained[i]} optimizer steps of iteration {start // width + 1}", f"sample {i}") for i in wrong
        ]
    return _listed("samples", len(everyone) * (len(step.updates) // width), problems)


def _masks(step: Step, update: DumpedUpdate) -> Check:
    """Check that the loss tokens are the policy's tokens, each once. Samples without effect have none if left out."""
    left_out, firsts, advantages = step.config.algorithm.leaves_out_zero_advantage, step.trajectories, list[Tensor]()
    if left_out:
        with_advantage = step.samples if step.has_roles else firsts
        of_turns = [s.text["turn_advantages"] for s in firsts] if "turn_advantages" in firsts[0].text else None
        advantages = _spread(step, [float(s.text["advantage"]) for s in with_advantage], of_turns)
    expected = {
        (i, token)
        for i, sample in enumerate(step.samples)
        if i in update.samples and not (step.is_masked(sample) or (left_out and not advantages[i].any()))
        for token in sample.places.tolist()
    }
    trained = Counter(zip(update.rows["sample"].tolist(), update.rows["token"].tolist(), strict=True))
    problems = [("not in the loss", spot) for spot in sorted(expected - trained.keys())]
    problems += [("in the loss by mistake", spot) for spot in sorted(trained.keys() - expected)]
    repeated = [(spot, times) for spot, times in sorted(trained.items()) if times > 1 and spot in expected]
    problems += [(f"in the loss {times} times", spot) for spot, times in repeated]
    placed = [(problem, f"sample {sample} token {token}") for problem, (sample, token) in problems]
    return _listed("masks", len(expected), placed)


def _with_kl(step: Step, table: list[list[float | None]]) -> list[list[float | None]]:
    """Return the table with one more reward for each scored sample: the sum of log(old / reference) over its tokens;
    for a masked sample the mean of its group's others.

    It is computed from the dumped rows, which have checks of their own.
    """
    kl, trajectories = [0.0] * len(table), step.trajectories
    for update in step.updates[: step.config.algorithm.steps_per_generation]:
        log_ratios = update.rows["old_logprobs"].double() - update.rows["ref_logprobs"].double()
        for sample, log_ratio in zip(update.rows["sample"].tolist(), log_ratios.tolist(), strict=True):
            kl[step.samples[sample].trajectory] += log_ratio
    for group in step.groups:
        counted = [kl[i] for i in group if not step.is_masked(trajectories[i])]
        for i in group:
            if step.is_masked(trajectories[i]):
                kl[i] = fmean(counted) if counted else 0.0
    return [[*row, None if all(value is None for value in row) else of] for row, of in zip(table, kl, strict=True)]


def _listed(quantity: str, count: int, problems: list[tuple[str, str]], note: str = "") -> Check:
    """Return a yes/no check: its difference is the number of wrong items, and it shows the first one."""
    first, where = problems[0] if problems else ("", "")
    return Check(quantity, count, not problems, float(len(problems)), NO_TOLERANCE, where, first, "", note=note)


def _rewards(step: Step) -> tuple[list[list[float | None]], list[float], Check]:
    """Return rewards per sample and function, weights and check. Dumped rewards replace user functions and judges."""
    functions, names = step.config.all_rewards.functions, step.config.all_rewards.names
    again = {name: f for name, f in zip(names, functions, strict=True) if f.function in REPEATABLE}
    values = [[s.text["rewards"].get(name) for name in names] for s in step.trajectories]
    pairs: list[tuple[float | None, float | None, str]] = []  # dumped, recomputed, place
    for sample, name, value in _scored_again(step, list(again.values())) if again else ():
        row, i = values[sample], names.index(name)
        pairs.append((row[i], value, f"sample {sample} {name}"))
        row[i] = value
    weights = [f.weight for f in functions]
    turns = [s.text["dialogue"]["rewards"] if s.text["dialogue"] else {} for s in step.trajectories]
    of_turns = list(dict.fromkeys(name for own in turns for name in own))
    values = [row + [own.get(name) for name in of_turns] for row, own in zip(values, turns, strict=True)]
    weights += [1.0] * len(of_turns)
    summed = [naive_advantages.weighted_sum(row, weights) for row in values]
    pairs += [
        (float(s.text["reward"]), reward, f"sample {i}")
        for i, (s, reward) in enumerate(zip(step.trajectories, summed, strict=True))
    ]
    pairs += naive_tokens.sums(step)
    not_run = [name for name in names if name not in again]
    said = [f"run again: {', '.join(again)}"] if again else []
    said += [f"weighted sum of what is dumped: {', '.join(not_run)}"] if not_run else []
    dumped = [math.nan if value is None else value for value, _, _ in pairs]
    recomputed = [math.nan if value is None else value for _, value, _ in pairs]
    check = compare("rewards", dumped, recomputed, ROUNDING_TOLERANCE, lambda i: pairs[i][2], note="; ".join(said))
    return values, weights, check


def _advantages(step: Step, table: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Return the advantage of each row of rewards; a task's rows are a batch of their own."""
    found, sizes = [math.nan] * len(table), step.config.group_sizes
    for task, indices in _of_tasks(step).items():
        own = [table[i] for i in indices]
        values = naive_advantages.advantages(own, weights, sizes[task], step.config.algorithm)
        for i, value in zip(indices, values, strict=True):
            found[i] = value
    return found


def _of_tasks(step: Step) -> dict[str, list[int]]:
    """Return the indices of each task's trajectories; a step without tasks has one, named ""."""
    found = defaultdict[str, list[int]](list)
    for i in range(len(step.trajectories)):
        found[step.task_of(i)].append(i)
    return found


def _scored_again(step: Step, functions: list[RewardFunction]) -> Iterator[tuple[int, str, float | None]]:
    """Yield (index of the trajectory, function, reward) of each function on the trajectories of its task."""
    section = RewardsSection(functions=functions, timeout=step.config.rewards.timeout, workers=1)
    limit, names = step.config.rollout.max_completion_length, step.config.task_rewards
    with RewardScorer(section, limit, of_tasks=names) as scorer:
        for task, indices in _of_tasks(step).items():
            with scorer.begin(task=task) as scoring:
                scoring.add(0, [_rollout(step.trajectories[i]) for i in indices])
                for i, scored in zip(indices, scoring.finish(), strict=True):
                    yield from ((i, name, scored.rewards[name]) for name in scorer.names if name in scored.rewards)


def _rollout(sample: Sample) -> Rollout:
    text, (prompt_ids, response) = sample.text, np.split(sample.token_ids.numpy(), [sample.prompt_length])
    opened, ids, dialogue = text.get("opened", ""), tuple(prompt_ids.tolist()), None
    prompt = Prompt(text["prompt_id"], ids, text["prompt"], text["columns"], opened=opened, task=text.get("task", ""))
    if text["dialogue"] is not None:
        written = torch.zeros(sample.length, dtype=torch.bool).index_fill(0, sample.places, True)
        dialogue = Dialogue.of_record(written[sample.prompt_length :].numpy(), text["dialogue"])
    response, zeros = response.astype(np.int32), np.zeros(len(response), np.float32)
    forced = tuple((start, stop) for start, stop in text.get("forced") or ())
    ended = text["finish_reason"], text["weight_version"], text["response"]
    return Rollout(prompt, response, zeros, *ended, dialogue, forced=forced)


def _numbers(step: Step, rows: Rows, result: Recomputed) -> Iterator[Check]:
    """Check the model's outputs, per token and in total."""
    tolerances, update = TOLERANCES[step.dtype], rows.update
    for quantity, name, recomputed in (
        ("policy log-probs", "policy_logprobs", result.policy_logprobs),
        ("old log-probs", "old_logprobs", result.old_logprobs),
        ("reference log-probs", "ref_logprobs", result.ref_logprobs),
        ("entropy", "entropy", result.entropy),
        ("full-vocabulary KL", "full_kl", result.kl),
        *((f"divergence from {name}", f"teacher.{name}", rows) for name, rows in result.teachers.items()),
    ):
        if rows.dumped(name) is not None:
            yield rows.compare(quantity, name, recomputed, tolerances.token, tolerances.average)

    def single(
        quantity: str, dumped: float, recomputed: float, tolerance: float, size: float = 1.0, remark: str = ""
    ) -> Check:
        return compare(quantity, [dumped], [recomputed], tolerance, lambda _: "", size, note=remark)

    for name, (value, border) in means(rows).items():
        quantity = name if "ratio" in name or name.startswith(("sampling/", "off_")) else f"mean {name}"
        yield single(quantity, update.metric(name), value, SUMMING_TOLERANCE + border)
    algorithm, lengths = step.config.algorithm, list(step.loss_lengths(update).values())
    divisor = naive_loss.denominator(lengths, algorithm.loss.average, step.config.rollout.max_completion_length)
    yield single("denominator", update.denominator, divisor, NO_TOLERANCE)
    yield single("loss", update.metric("loss"), result.loss, tolerances.loss, result.loss_size, note(algorithm))
    yield single("grad_norm", update.metric("grad_norm"), result.grad_norm, tolerances.grad_norm, 0.0)
