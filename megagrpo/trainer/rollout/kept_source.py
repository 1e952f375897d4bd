"""Groups of a run that trains from kept rollouts: they are read and scored again, and nothing is generated."""

from __future__ import annotations

from collections.abc import Generator as Stream
from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.engine.http.protocol import EngineError
from megagrpo.platform.parallel.agree import on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.records.rows.kept_rollouts import KeptRollouts, last_kept_step
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.rollout.scored_groups import ScoredGroup, begin_scoring
from megagrpo.types import Prompt, SamplingParams


@dataclass(frozen=True)
class KeptSource:
    """Hands out kept groups in place of an engine; see `GroupSource`."""

    kept: KeptRollouts
    rewards: RewardScorer

    def groups(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int
    ) -> Stream[ScoredGroup]:
        """Yield `n` kept rollouts of each prompt for the step after `step` steps. Raises EngineError for a prompt
        without them."""
        for index, prompt in enumerate(prompts):
            try:
                rollouts = self.kept.group(step + 1, seed, prompt, prompt.group_size(n))
            except (LookupError, OSError) as error:
                raise EngineError(f"rollout.kept.path: {error}") from error
            yield begin_scoring(self.rewards, index, rollouts, step)


def open_kept(
    config: RunConfig, prompts: PromptOrder, rewards: RewardScorer | None, tokenizer: Tokenizer | None, layout: Layout
) -> KeptSource | None:
    """Open the kept rollouts of `rollout.kept.path` on each leader; None on other ranks. With `by` prompt, rows without
    rollouts are never drawn. Collective. Raises ValueError."""
    path, by = config.rollout.kept.folder, config.rollout.kept.by

    def opened() -> KeptSource | None:
        if rewards is None or tokenizer is None:
            return None
        return KeptSource(KeptRollouts(path, by, tokenizer.decode), rewards)

    source = run_own_and_agree(layout, opened)
    if by == "prompt":
        leave_out_others(prompts, on_first_rank(layout, lambda: source.kept.prompt_ids if source else set()))
    return source


def last_step(config: RunConfig, layout: Layout) -> int:
    """Return the run's last step: that of the kept rollouts, if they end earlier. Collective. Raises ConfigError for
    rollouts without steps."""
    kept, steps = config.rollout.kept, config.run.num_steps
    if kept.path is None or kept.by == "prompt":
        return steps
    last = on_first_rank(layout, lambda: last_kept_step(kept.folder))
    if not last:
        raise ConfigError(f"rollout.kept.path: {kept.path} has rollouts of no step; use rollout.kept.by=prompt")
    return min(steps, kept.to_step or steps, last)


def leave_out_others(prompts: PromptOrder, kept: set[int]) -> None:
    """Leave out all rows but the `kept` ones. Raises ConfigError if no row is left."""
    try:
        prompts.leave_out({*range(len(prompts))} - kept)
    except ValueError as error:
        raise ConfigError(
            "rollout.kept.path: no row of data.train has kept rollouts; name rollouts of this data, whose prompt_id is "
            "the row's number"
        ) from error
