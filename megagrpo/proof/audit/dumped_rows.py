"""The rows of a dumped optimizer step, one per loss token, and the metrics computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.proof.audit import naive, naive_loss
from megagrpo.proof.audit.audit_compare import ROUNDING_TOLERANCE, Check, compare
from megagrpo.proof.audit.naive_loss import Response
from megagrpo.proof.audit.saved import DumpedUpdate, Step

BORDER = 1e-5  # relative: a ratio this close to a bound may be on its other side in float32


class Rows:
    """The rows of one optimizer step that belong to a token of a sample. The check of the masks covers the others."""

    def __init__(self, step: Step, update: DumpedUpdate):
        self.step, self.update = step, update
        sample, token = update.rows["sample"].long(), update.rows["token"].long()
        lengths = torch.tensor([s.length for s in step.samples])
        of_sample = lengths[sample.clamp(0, len(lengths) - 1)]
        self._valid = (sample >= 0) & (sample < len(lengths)) & (token >= 0) & (token < of_sample)
        self.sample, self.token = sample[self._valid], token[self._valid]
        self._place = (lengths.cumsum(0) - lengths)[self.sample] + self.token

    def dumped(self, name: str) -> Tensor | None:
        """Return a dumped column [n] float64, or None if the dump has none."""
        return self.column(name) if name in self.update.rows else None

    def column(self, name: str) -> Tensor:
        """Return a dumped column [n] float64. Raises KeyError if the dump has none."""
        return self.update.rows[name][self._valid].double()

    def recomputed(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Select from rows [L] or [Lr] of each sample the values at these rows' tokens; NaN where there is no value."""
        whole = []
        for sample, row in zip(self.step.samples, rows, strict=True):
            filled = torch.full((sample.length,), math.nan, dtype=torch.float64)
            if row is not None:
                is_whole = row.numel() == sample.length
                filled = row.double() if is_whole else filled.index_copy(0, sample.places, row.double())
            whole.append(filled)
        return torch.cat(whole)[self._place]

    def by_sample(self, name: str) -> list[Tensor]:
        """Return the dumped column `name` at the policy's tokens [Lr] of each sample; NaN where it has no row."""
        lengths = [sample.length for sample in self.step.samples]
        whole = torch.full((sum(lengths),), math.nan, dtype=torch.float64)
        if name in self.update.rows:
            whole[self._place] = self.column(name)
        return [part[sample.places] for part, sample in zip(whole.split(lengths), self.step.samples, strict=True)]

    def ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the probability ratio [n] of these tokens as the loss computes it."""
        ratio, level = torch.empty_like(log_ratio), self.step.config.algorithm.importance_sampling_level
        for sample in self.sample.unique():
            mine = self.sample == sample
            ratio[mine] = naive_loss.probability_ratio(log_ratio[mine], level)
        return ratio

    def compare(
        self,
        quantity: str,
        name: str,
        rows: Sequence[Tensor | None],
        tolerance: float = ROUNDING_TOLERANCE,
        average: float | None = None,
        size: float = 1.0,
    ) -> Check:
        """Compare the dumped column `name` [n] with the values [L] or [Lr] of each sample."""
        of_rows = self.column(name), self.recomputed(rows)
        return compare(quantity, *of_rows, tolerance, self._where, size, average)

    def _where(self, i: int) -> str:
        return f"sample {int(self.sample[i])} token {int(self.token[i])}"


def means(rows: Rows) -> dict[str, tuple[float, float]]:
    """Return metrics over the loss tokens from the dumped rows, named as in metrics.jsonl, to check the ranks' sums.

    Each comes with its allowed error from ratios close to a bound, which rounding may put on either side.
    """
    if not rows.sample.numel():
        return {}
    policy, rollout, entropy = (rows.column(name) for name in ("policy_logprobs", "rollout_logprobs", "entropy"))
    dumped_old, ref, full_kl = (rows.dumped(name) for name in ("old_logprobs", "ref_logprobs", "full_kl"))
    old = policy if dumped_old is None else dumped_old
    algorithm = rows.step.config.algorithm
    apart = (old - rollout).abs()
    exact = naive.mismatch(old, rollout) | {"entropy": entropy.mean().item()}
    for which, value in (("mean", apart.mean()), ("max", apart.max())):
        exact[f"sampling/sampling_logp_difference/{which}"] = value.item()
    if algorithm.top_entropy_quantile < 1:
        threshold = naive_loss.top_threshold(entropy.tolist(), algorithm.top_entropy_quantile)
        exact["entropy/top"] = entropy[entropy >= threshold].mean().item()
    if ref is not None and not algorithm.kl_in_reward:
        full_kl = naive.estimated_kl(ref - policy, rows.ratio(policy - old), algorithm)
    if full_kl is not None:
        exact = {"kl": full_kl.mean().item()} | exact
    for name, section in algorithm.teachers.items():
        if (row := rows.dumped(f"teacher.{name}")) is not None:
            row = old - row if section.over == "sampled" else row
            exact[f"teacher/{name}/divergence"] = row.nanmean().item()
    without_border = {name: (value, 0.0) for name, value in exact.items()}
    return without_border | _clip_ratios(rows, policy - old) | _corrections(rows, policy, old)


def _clip_ratios(rows: Rows, log_ratio: Tensor) -> dict[str, tuple[float, float]]:
    """Return the clipped shares of tokens; of sequences if a sequence has one ratio."""
    algorithm, ratio, advantage = rows.step.config.algorithm, rows.ratio(log_ratio), rows.column("advantage")
    dumped_old = rows.dumped("old_logprobs")
    old = rows.column("policy_logprobs") if dumped_old is None else dumped_old
    for name, section in algorithm.teachers.items():
        if section.over == "sampled" and (row := rows.dumped(f"teacher.{name}")) is not None:
            advantage = advantage - section.weight_at(rows.step.number) * (old - row).nan_to_num(nan=0.0)
    by_sequence = algorithm.importance_sampling_level == "sequence"
    weights = torch.full_like(ratio, 1 / len(ratio))
    if by_sequence:
        weights = 1 / rows.sample.bincount()[rows.sample].double() / rows.sample.unique().numel()

    def share(*sides: tuple[float, int]) -> tuple[float, float]:
        """Return the share of ratios beyond the (bound, sign) pairs, and the share close to one: above where A > 0 for
        sign 1, below where A < 0 for sign -1."""
        none = torch.zeros_like(ratio)
        beyond = sum((((sign * ratio > sign * bound) & (sign * advantage > 0)).double() for bound, sign in sides), none)
        near = sum((((ratio / bound - 1).abs() < BORDER).double() for bound, _ in sides if bound), none)
        return (weights * beyond).sum().item(), (weights * near).sum().item()

    if algorithm.loss.clips == "weight":
        return {"cispo_clip_ratio": share((algorithm.upper_epsilon, 1))}
    if algorithm.loss.clips != "ratio":
        return {}
    low, high = (1 - algorithm.epsilon, -1), (1 + algorithm.upper_epsilon, 1)
    return {
        "clip_ratio/low_mean": share(low),
        "clip_ratio/high_mean": share(high),
        "clip_ratio/region_mean": share(low, high),
    }


def _corrections(rows: Rows, policy: Tensor, old: Tensor) -> dict[str, tuple[float, float]]:
    """Return train-inference correction weights, and the share of tokens that off-policy masking keeps, per sample."""
    algorithm = rows.step.config.algorithm
    rollout, advantage = rows.column("rollout_logprobs"), rows.column("advantage")
    corrects, threshold = algorithm.importance_correction != "off", algorithm.off_policy_mask_threshold
    weights: list[Tensor] = []
    is_counted: list[Tensor] = []
    near = 0.0
    for sample in rows.sample.unique():
        mine = rows.sample == sample
        of = Response(policy[mine], old[mine], rollout[mine], policy[mine], rows.token[mine], advantage[mine])
        if corrects:
            of_sample = naive_loss.correction(of, algorithm)
            weights.append(of_sample if algorithm.importance_correction.startswith("token") else of_sample.mean()[None])
        if threshold is not None:
            distance = naive_loss.left_behind(of, algorithm)
            counts = float(not (of.advantage[0] < 0 and distance > threshold))
            is_counted.append(torch.full((len(of.old),), counts, dtype=torch.float64))
            near += len(of.old) * (bool(of.advantage[0] < 0) and abs(distance - threshold) < BORDER)
    metrics = {}
    if corrects:
        every, name = torch.cat(weights), "sampling/importance_sampling_ratio"
        values = {"mean": every.mean(), "min": every.min(), "max": every.max()}
        metrics = {f"{name}/{which}": (value.item(), 0.0) for which, value in values.items()}
    if threshold is not None:
        metrics["off_policy_mask/kept"] = (torch.cat(is_counted).mean().item(), near / len(policy))
    return metrics
