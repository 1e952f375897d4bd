"""Defines the section `algorithm`: the loss and the advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megagrpo.config.basics.task_values import weights_by_step
from megagrpo.config.sections.loss_table import LOSSES, ROW_LOSSES, Average, Loss, custom_loss
from megagrpo.config.sections.rewards import numbered
from megagrpo.config.sections.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    choice_or_user_code,
)

ADVANTAGE_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")


class CriticSection(Section):
    path: str | None = None
    """The critic's model, as `model.path` names one: with the policy's tokens, or a reward model, whose head it keeps.
    Empty: the policy's weights, and values of 0."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic; everything else is as in `train`."""
    gamma: Fraction = 1.0
    """Factor of the value of the next token, or turn with `advantage_by: turn`."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Weight of later tokens, or turns, in an advantage: 0 trusts the critic, 1 the reward."""
    critic_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """`gae_lambda` of the returns that the critic learns (VC-PPO); the same when empty."""
    length_adaptive_alpha: PositiveFloat | None = None
    """A response of l tokens, or turns, gets the gae_lambda 1 - 1 / (alpha l) (VAPO, with 0.05); all the same when
    empty."""
    value_clip: PositiveFloat | None = 0.2
    """How far a value may move from the one before the step in the critic's loss; any distance when empty."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which only the critic learns."""


class TeacherSection(Section):
    """A model that teaches the policy on the policy's own responses."""

    path: str | None = None
    """The teacher: a model as `model.path` names one, of any supported family and size, with the policy's tokens;
    `policy`, the policy at the begin of the step; or `reference`, the run's reference model."""
    urls: list[str] = []
    """vLLM servers, such as `http://host:8000`, that serve the teacher under the name `path`; none: it is loaded."""
    prompt: str | None = None
    """The prompt that the teacher reads in place of the policy's: a text with columns, such as
    `{prompt} The answer is {answer}.`, or one column, `{hinted}`, with a text or messages."""
    where: dict[str, str | int | float | list[str | int | float]] = {}
    """Columns and their values, one or a list, of the rows that the teacher teaches, such as `{subject: [algebra]}`;
    `task` is the row's task. It teaches all rows when empty."""
    divergence: Literal["forward", "reverse", "jensen_shannon", "skewed_forward", "skewed_reverse"] = "reverse"
    """What the loss adds at each token: KL(teacher || policy), KL(policy || teacher), or one of these with a mixture.
    docs/distillation.md has the formulas."""
    mix: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jensen_shannon: share of the teacher in the mixture (`beta` of GKD). skewed: share of the other distribution."""
    over: Literal["vocabulary", "sampled"] | PositiveInt = "vocabulary"
    """What the divergence compares: the whole vocabulary, exactly; the teacher's so many most likely tokens, and all
    others as one; or the sampled token, whose log(teacher / policy) is added to its advantage."""
    weight: float | dict[int, float] = 1.0
    """Weight of the divergence, or weights by the step from which they hold: `{1: 1.0, 100: 0.1}`."""

    @property
    def is_own(self) -> bool:
        """Whether the teacher is the run's policy or reference, without weights of its own."""
        return self.path in ("policy", "reference")

    def weight_at(self, step: int) -> float:
        """Return the weight at `step`, counted from 1."""
        by_step = weights_by_step([self.weight])
        return by_step[max(first for first in by_step if first <= step)][0]


def _listed(teachers: object) -> object:
    return [teachers] if isinstance(teachers, dict) else teachers


class AlgorithmSection(Section):
    loss_type: Annotated[str, *choice_or_user_code(LOSSES | ROW_LOSSES)] = "dapo"
    """The loss and how its tokens are averaged: docs/losses.md. Your own: `path/file.py:function` or
    `package.module:function`."""
    loss_average: Average | None = None
    """How a loss of your own averages its tokens: over tokens (empty), as means of samples, as sums of samples, or over
    samples x max_completion_length."""
    loss_args: dict[str, float] = {}
    """Arguments of a loss on pairs of responses, such as `{label_smoothing: 0.1}`: docs/sft_and_preferences.md."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the reference model; 0 builds no reference. Of a loss on pairs the scale."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "low_var", "full_forward", "full_reverse"] = "k3"
    """The KL term of a token: estimated from its log-probs, or exact over the whole vocabulary, forward KL(ref ||
    policy) or reverse KL(policy || ref). docs/kl.md compares them."""
    use_bias_correction_kl: bool = False
    """Multiply the estimate by the probability ratio: the mean gradient is then the gradient of KL(policy || ref)."""
    kl_in_reward: bool = False
    """Take `beta` times a response's KL (summed k1) from its reward before advantages, and add nothing to the loss."""
    teacher: Annotated[
        list[TeacherSection], BeforeValidator(_listed, json_schema_input_type=TeacherSection | list[TeacherSection])
    ] = []
    """Models that teach the policy on its own responses, one mapping or a list, beside rewards or, with
    `rewards.functions: []`, in their place: docs/distillation.md."""
    sync_ref_model: bool = False
    """Let the reference follow the policy: every `ref_model_sync_steps` steps it becomes their mixture."""
    ref_model_mixup_alpha: Fraction = 0.6
    """Share of the policy in that mixture; 1 makes the reference the policy."""
    ref_model_sync_steps: PositiveInt = 512
    """Steps between two updates of the reference."""
    epsilon: NonNegativeFloat = 0.2
    """Lower clip range of the probability ratio."""
    epsilon_high: NonNegativeFloat | None = None
    """Upper clip range; `epsilon` when empty. For cispo the largest weight itself."""
    delta: PositiveFloat | None = None
    """Upper bound of the ratio where the advantage is negative (two-sided clip); none when empty."""
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """A token's ratio: its own, its sequence's geometric mean (GSPO), or that with its own gradient (GSPO-token)."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """Sharpness of sapo's gate at positive advantages."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """Sharpness of sapo's gate at negative advantages."""
    vespo_k_pos: NonNegativeFloat = 2.0
    """vespo: power of the sequence weight at positive advantages."""
    vespo_lambda_pos: NonNegativeFloat = 3.0
    """vespo: damping of the sequence weight at positive advantages."""
    vespo_k_neg: NonNegativeFloat = 3.0
    """vespo: power of the sequence weight at negative advantages."""
    vespo_lambda_neg: NonNegativeFloat = 2.0
    """vespo: damping of the sequence weight at negative advantages."""
    fipo_decay_rate: PositiveFloat = 32.0
    """fipo: tokens after which the weight of what follows is halved."""
    fipo_clip_range: Fraction = 0.2
    """fipo: how far the weight of a token may be from 1."""
    fipo_clip_high_only: bool = True
    """fipo: no weight below 1."""
    fipo_safety_threshold: PositiveFloat | None = 4.0
    """fipo: above this ratio a token with negative advantage gets a weight of at most 1; no bound when empty."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The policy term counts this share of the loss tokens of all ranks, the tokens of highest entropy, and all tokens
    that tie with the last one. The KL term counts all. Below 1 costs one more forward pass per optimizer step."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus: the loss decreases by this times the mean entropy over the policy term's tokens."""
    use_adaptive_entropy: bool = False
    """Adapt `entropy_coef` after every optimizer step by entropy_coef_delta: up if the mean entropy is at most
    entropy_target, else down. docs/losses.md."""
    entropy_target: NonNegativeFloat = 0.2
    """Mean entropy, in nats per token, at or below which the adaptive bonus applies."""
    entropy_coef_delta: NonNegativeFloat = 0.005
    """Step of the adaptive weight."""
    entropy_coef_min: NonNegativeFloat = 0.0
    """Smallest adaptive weight."""
    entropy_coef_max: NonNegativeFloat = 1.0
    """Largest adaptive weight."""
    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Exclude a sequence with negative advantage from the policy term when the policy has moved away from it: mean
    log(sampled / policy) above this."""
    importance_correction: Literal[
        "off",
        "token_truncate",
        "token_mask",
        "token_reject",
        "sequence_truncate",
        "sequence_mask",
        "geometric_truncate",
        "geometric_mask",
    ] = "off"
    """Weight the policy term by trainer / engine probability of the sampled tokens, their product over the sequence, or
    its geometric mean, within a band: docs/losses.md."""
    importance_correction_min: PositiveFloat | None = None
    """Lower end of the band; none when empty."""
    importance_correction_max: PositiveFloat | None = 3.0
    """Upper end of the band; none when empty."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture of experts, as transformers defines it, over all response tokens
    of the step. Above 0 costs one more forward pass per optimizer step."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Aux-loss-free balancing of DeepSeek-V3: after each optimizer step the selection bias of an expert moves by this,
    up if it got fewer response tokens than its layer's mean, else down. DeepSeek-V3 was pretrained with 0.001."""
    loss_share_of_tasks: Literal["prompts", "tasks"] | None = None
    """Share of each of the `tasks` in the loss: that of its prompts, or the same for all. Empty: as `loss_type` weighs
    tokens or responses, so that with a mean over tokens long responses count more. `tasks.NAME.loss_weight` multiplies
    it."""
    num_iterations: PositiveInt = 1
    """How often each step's rollouts are trained on."""
    steps_per_generation: PositiveInt = 1
    """Optimizer steps in one pass over a step's rollouts. Each divides by its own tokens or samples."""
    advantage_estimator: Annotated[str, *choice_or_user_code(ADVANTAGE_ESTIMATORS)] = "grpo"
    """What a reward is compared with: its group's mean, the mean of the group's others (rloo), or the batch's mean.
    reinforce_plus_plus and its baseline form, which keeps the group's mean, always divide by the batch's std. gae: with
    the values of a critic, which is PPO (docs/ppo.md). A function of your own (docs/credit.md) returns the advantages
    themselves."""
    critic: CriticSection = CriticSection()
    """The critic of `advantage_estimator: gae`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the centred rewards are divided by: the group's std, the batch's std, or nothing. With gae the advantages of
    the step's tokens get mean 0 and std 1, or stay as they are with none."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Add the functions' rewards, or first normalise each within its group (GDPO), so that none drowns the others."""
    advantage_by: Literal["trajectory", "turn", "state", "token", "process"] = "trajectory"
    """What has an advantage. trajectory: the whole response or conversation. turn: each turn, compared with the turns
    with the same number (MT-GRPO). state: each turn, compared with the turns that answered the same messages (GiGPO).
    token, process: each token, by the rewards of functions with `per: token` from it on, as a sum or normalized.
    docs/credit.md."""
    turn_advantage_weight: PositiveFloat = 1.0
    """Weight of a turn's own advantage with `advantage_by` turn or state."""
    token_advantage_weight: PositiveFloat = 1.0
    """Weight of a token's own advantage with `advantage_by` token or process."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Factor of the reward of the next turn in a turn's return, with `advantage_by: state`."""
    dynamic_sample: bool | str = False
    """Replace groups whose rewards are all equal, which have no gradient, by groups of newly drawn prompts (DAPO).
    true: the weighted sum decides. The name of a reward function: its rewards decide. outcome: the rewards of all
    functions decide but those of the penalties soft_overlong, repetition and token_repetition."""
    max_resample_times: PositiveInt = 3
    """Rounds of drawing that `dynamic_sample` may add to a step."""
    dynamic_sample_fallback: Literal["original", "partial"] = "original"
    """Groups of a step that is not full after all rounds. original: the groups drawn first. partial: only groups with
    unequal rewards; if there are none, the groups drawn first."""
    mask_truncated_completions: bool = False
    """Exclude the tokens of responses that were truncated at `max_completion_length` from the loss, its metrics and the
    token count. Their rewards stay in the statistics of their group, and they still count as sequences."""
    skip_zero_advantage: bool = True
    """Skip samples whose advantage is exactly 0 where they add no gradient: not with beta, a router option, an entropy
    option or a loss of your own. The update is the same."""

    @property
    def upper_epsilon(self) -> float:
        """`epsilon_high`, or `epsilon` when it is empty."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def loss(self) -> Loss:
        """The row of `loss_type`."""
        return (LOSSES | ROW_LOSSES).get(self.loss_type) or custom_loss(self.loss_type, self.loss_average)

    @property
    def has_critic(self) -> bool:
        """Whether a critic's values are the baseline."""
        return self.advantage_estimator == "gae"

    @property
    def own_estimator(self) -> bool:
        """Whether `advantage_estimator` names the user's function."""
        return self.advantage_estimator not in ADVANTAGE_ESTIMATORS

    @property
    def advantage_by_turns(self) -> bool:
        """Whether `advantage_by` gives each turn an advantage."""
        return self.advantage_by in ("turn", "state")

    @property
    def advantage_by_tokens(self) -> bool:
        """Whether `advantage_by` gives each token an advantage, from rewards of tokens."""
        return self.advantage_by in ("token", "process")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in each step."""
        return self.num_iterations * self.steps_per_generation

    @property
    def gradient_is_local(self) -> bool:
        """Whether the loss's gradient with respect to a token's log-prob depends on no other token's log-prob."""
        return (
            self.loss.local
            and self.importance_sampling_level == "token"
            and self.importance_correction in ("off", "token_truncate", "token_mask")
            and self.off_policy_mask_threshold is None
        )

    @property
    def teachers(self) -> dict[str, TeacherSection]:
        """The teachers by short unique names: the last parts of their paths."""
        names = numbered((teacher.path or "").rstrip("/").rpartition("/")[2] for teacher in self.teacher)
        return dict(zip(names, self.teacher, strict=True))

    @property
    def entropy_bonus(self) -> bool:
        """Whether the loss may have an entropy bonus."""
        return self.entropy_coef > 0 or self.use_adaptive_entropy

    @property
    def full_kl(self) -> bool:
        """Whether the KL term is exact over the whole vocabulary."""
        return self.kl_estimator.startswith("full_")

    @property
    def compares_all_tokens(self) -> bool:
        """Whether the policy is compared with distributions over the whole vocabulary."""
        return bool(self.teacher) or (self.full_kl and self.beta > 0)

    @property
    def leaves_out_zero_advantage(self) -> bool:
        """Whether samples whose advantage is 0 are skipped."""
        has_gradient = self.beta or self.counts_in_routers or self.entropy_bonus or self.top_entropy_quantile < 1
        has_gradient = (
            has_gradient or bool(self.teacher) or self.loss.custom or self.has_critic or not self.loss.generates
        )
        return self.skip_zero_advantage and not has_gradient

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference model."""
        teaches = any(teacher.path == "reference" for teacher in self.teacher)
        return teaches or (self.beta > 0 and self.loss.reference)

    @property
    def counts_in_routers(self) -> bool:
        """Whether routers compute sums over the response tokens."""
        return bool(self.router_aux_loss_coef or self.moe_router_bias_update_rate)
