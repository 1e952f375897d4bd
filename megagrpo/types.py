"""Prompts and rollouts, the dataclasses that rooms exchange, with their shapes. `train_types.py` has those of training.

Legend: Lp tokens of a prompt, Lr tokens of a response.

The examples in the docstrings are one story, from a prompt to its loss: P = 1 prompt of Lp = 3 tokens with G = 2
responses. Later examples use the names of earlier ones, also in `train_types.py`. `tests/unit/test_types.py` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Parameters of a row that change log-probs. Others end a response or choose its random numbers.
OF_DISTRIBUTION = (
    *("temperature", "structured_outputs", "allowed_token_ids", "logit_bias", "repetition_penalty"),
    *("top_p", "top_k", "min_p"),
)
# [tokens, M, k] uint8 or int16: k experts of a token in each of M layers with experts (data/packing/routed_experts.py)
Routes = NDArray[np.uint8] | NDArray[np.int16]


@dataclass(frozen=True)
class Prompt:
    """A question with its chat template applied, ready for the engine.

    `inputs` are what the model reads besides tokens, by name, such as the pixels of an image: arrays or tensors of this
    prompt alone, without a batch dimension. Rollouts, samples and micro-batches pass the same object on, without
    copies (`data/images/prompt_images.py`). It is empty for models of text, whose policy rejects a non-empty one.

    >>> prompt = Prompt(prompt_id=0, token_ids=(5, 6, 7), messages="2 + 2?", columns={"answer": "4"})
    >>> Prompt(1, (5,), "", sampling={"temperature": 0.5, "max_tokens": 9}).distribution
    {'temperature': 0.5}
    """

    prompt_id: int  # row in the data set; with several tasks, plus the rows of the tasks before
    token_ids: tuple[int, ...]  # [Lp]
    messages: str | list[dict[str, Any]]  # the question before the chat template
    columns: dict[str, Any] = field(default_factory=dict)  # the data set's other columns, for the reward functions
    occurrence: int = 0  # earlier prompts of the step with the same prompt_id; sampling seeds depend on it
    position: int | None = None  # unique index in the run's stream of prompts; None if it is not from that stream
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # this prompt's variables of the chat template
    opened: str = ""  # the end of token_ids as text if it opens a thought for the response, such as "<think>\n"
    inputs: Mapping[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(
        default_factory=dict
    )  # its own parameters (`data/tokens/row_settings.py`), JSON values
    expected_length: float = 0.0  # mean tokens of the responses at the prompt's last visit; 0 if it had none
    task: str = ""  # name of its task, if the run has several
    num_generations: int | None = None  # size of its group, if its task sets it
    # what each of `algorithm.teachers` reads before a response: token ids, () for this prompt's, None: it does not
    # teach the row. None: all teachers read this prompt
    teachers: Mapping[str, tuple[int, ...] | None] | None = None

    def group_size(self, num_generations: int) -> int:
        """Return the size of its group in a run with `rollout.num_generations`."""
        return self.num_generations or num_generations

    @property
    def distribution(self) -> dict[str, Any]:
        """The parameters in `sampling` that change log-probs, which the trainer needs."""
        return {name: value for name, value in self.sampling.items() if name in OF_DISTRIBUTION}


@dataclass(frozen=True)
class Truncation:
    """The tokens that a sampler may choose from softmax(logits / temperature), by vLLM's rules: min_p, top_k, top_p.

    Of the probabilities 0.5, 0.3, 0.15 and 0.05, top_p 0.7 keeps the first two, and min_p 0.2 those of at least 0.1.

    >>> bool(Truncation(top_p=0.7)), bool(Truncation(top_p=1.0))
    (True, False)
    """

    top_p: float = 1.0  # keep the most likely tokens until their probabilities add up to top_p; 1 keeps all
    top_k: int = 0  # keep the top_k most likely tokens; 0 keeps all
    min_p: float = 0.0  # keep tokens with at least min_p times the largest probability; 0 keeps all

    def __bool__(self) -> bool:
        """Return whether the rules drop any token."""
        return self != NO_TRUNCATION


NO_TRUNCATION = Truncation()


@dataclass(frozen=True)
class Thinking:
    """The budget of a thought. A response that is still thinking after `max_tokens` tokens gets `end_ids`, and goes on
    (`data/tokens/thinking.py`).

    >>> ended = Rollout(prompt, (8, 9, 7, 2), (-0.5, -0.25, 0.0, -0.125), "stop", 1, "", forced=((2, 3),))
    >>> Thinking(2, "<think>", "</think>", end_ids=(7,)).max_tokens, ended.length
    (2, 3)
    """

    max_tokens: int
    opening: str  # the text before a thought, such as <think>
    closing: str
    end_ids: tuple[int, ...]  # tokens of a text with `closing`
    tags: tuple[tuple[int, str], ...] = ()  # those of `opening` and `closing` that are one token: its id, its text


@dataclass(frozen=True)
class SamplingParams:
    """How the engine samples. Log-probs are those of softmax(logits / temperature) over tokens that `truncation` keeps.
    Before that, tokens that `constraint` or `allowed_token_ids` forbid are excluded, and logits get `logit_bias`, then
    `repetition_penalty`.

    >>> sampling = SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=(2,))
    >>> sampling.changes_logits, SamplingParams(1.0, 3, logit_bias=((8, 3.0),)).changes_logits
    (False, True)
    """

    temperature: float  # 0 is greedy
    max_tokens: int  # limit of a response
    stop_token_ids: tuple[int, ...] = ()  # each of them ends a response and is part of it
    truncation: Truncation = NO_TRUNCATION
    stop: tuple[str, ...] = ()  # texts that end a response, at the token that completes the text
    include_stop: bool = True  # whether the response's text includes the text of `stop` that ended it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    # positive logits of tokens before are divided by it, negative ones multiplied
    repetition_penalty: float = 1.0
    constraint: tuple[str, str] | None = None  # of the text: "regex", "json" or "grammar", and it
    allowed_token_ids: tuple[int, ...] = ()  # () allows all
    thinking: Thinking | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        forbids = self.constraint is not None or self.allowed_token_ids
        return bool(forbids or self.logit_bias or self.repetition_penalty != 1)


def _equal(one: object, other: object) -> bool:
    """Compare two dataclasses by their fields, and arrays by their elements."""
    if type(one) is not type(other):
        return NotImplemented
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(np.array_equal(a, b) if np.ndarray in (type(a), type(b)) else a == b for a, b in pairs)


def _keep_as(row: object, **dtypes: type) -> None:
    """Convert these fields of a frozen dataclass to arrays. Arrays of the dtype are kept without a copy."""
    for name, dtype in dtypes.items():
        object.__setattr__(row, name, np.asarray(getattr(row, name), dtype))


# How a conversation may end (docs/multi_turn.md), and why one may fail.
ENDINGS = ("done", "length", "budget", "max_turns", "tool_limit", "time_limit", "failed")
CAUSES = ("", "timeout", "died", "raised", "protocol", "prompt_length", "messages")


@dataclass(frozen=True)
class Turn:
    """One turn of the policy in a conversation, and what followed it.

    >>> Turn(start=0, stop=2, calls=("calculator",)).failures
    0
    """

    start: int  # its tokens are [start, stop) of the response
    stop: int
    reward: float | None = None  # of a scheduler; None: it gave none
    calls: tuple[str, ...] = ()  # names of the tools that were called
    failures: int = 0  # of these calls
    shortened: int = 0  # of these calls: their results were longer than `multi_turn.max_result_chars`
    finish_reason: str = "stop"  # "stop" or "length"
    generated: float = field(default=0.0, compare=False)  # seconds until the policy had written it
    answered: float = field(default=0.0, compare=False)  # seconds that tools, scheduler or environment then took
    queued: float = field(default=0.0, compare=False)  # seconds of `generated` that it waited for a server's slot
    began: float = field(default=0.0, compare=False)  # seconds since 1970 when it was asked for; 0: not recorded


@dataclass(frozen=True, eq=False)
class Dialogue:
    """What a response with several turns has besides its tokens.

    Tokens that the policy did not write (results of tools, messages of the user) count nowhere: not in the loss, and
    not in lengths, denominators or comparisons of log-probs.

    >>> turns = Turn(0, 1, calls=("calculator",)), Turn(2, 3)
    >>> dialogue = Dialogue(np.array([True, False, True]), messages=(), turns=turns, ended="done")
    >>> Rollout(prompt, (8, 9, 2), (-0.5, 0.0, -0.125), "stop", 1, "4", dialogue).length  # 9 is a tool's
    2
    """

    written: NDArray[np.bool_]  # [Lr], True at tokens that the policy wrote
    messages: tuple[dict[str, Any], ...]  # all messages after the prompt: the policy's, the tools' and the user's
    turns: tuple[Turn, ...]  # of the policy, in order
    ended: str  # one of ENDINGS
    rewards: dict[str, float | None] = field(default_factory=dict)  # of turns and environment by column, weight 1
    cause: str = ""  # one of CAUSES if it failed
    retries: int = 0  # earlier attempts at this response, which failed
    counts: dict[str, int] = field(default_factory=dict)  # by metric, of which a step has the sums
    role: str = ""  # who writes the policy's turns, if the agent has roles
    outputs: dict[str, str | None] = field(default_factory=dict)  # files that a program has left, for rewards

    __eq__ = _equal

    def __post_init__(self) -> None:
        _keep_as(self, written=np.bool_)

    @property
    def tool_calls(self) -> int:
        """The number of tool calls."""
        return sum(len(turn.calls) for turn in self.turns)

    @property
    def tool_failures(self) -> int:
        """The number of tool calls that failed."""
        return sum(turn.failures for turn in self.turns)

    @property
    def tool_shortened(self) -> int:
        """The number of tool calls whose results were shortened."""
        return sum(turn.shortened for turn in self.turns)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of all turns together: waiting for slots, generation without it, answers of tools, scheduler or
        environment. Then the longest turn's and the longest answer's seconds."""
        columns = [[getattr(turn, name) for turn in self.turns] for name in ("queued", "generated", "answered")]
        queued, generated, answered = map(sum, columns)
        return queued, generated - queued, answered, max(columns[1], default=0.0), max(columns[2], default=0.0)

    def record(self) -> dict[str, Any]:
        """Return all fields except `written` and `outputs` as JSON values, for files."""
        left_out = {"written", "outputs", *(() if self.role else ("role",))}
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        return fields | {"turns": [vars(turn) for turn in self.turns]}

    @classmethod
    def of_record(cls, written: NDArray[np.bool_], record: dict[str, Any]) -> Dialogue:
        """Return the dialogue with this mask [Lr] and the fields of `record`."""
        turns = tuple(Turn(**turn | {"calls": tuple(turn["calls"])}) for turn in record["turns"])
        return cls(written, **record | {"turns": turns, "messages": tuple(record["messages"])})


@dataclass(frozen=True, eq=False)
class Rollout:
    """One prompt with one sampled response. Rows [Lr] may be given as any sequence; they become arrays.

    >>> ids, logprobs = np.array([8, 9, 2], np.int32), np.array([-0.5, -0.25, -0.125], np.float32)
    >>> right = Rollout(prompt, ids, logprobs, "stop", weight_version=1, text="4")
    >>> cut = Rollout(prompt, (8, 3), (-0.5, -1.0), "length", weight_version=1, text="33", later_versions=((1, 2),))
    >>> right.length, cut.token_versions.tolist()  # a sync came before the second token of `cut`
    (3, [1, 2])
    """

    prompt: Prompt
    response_ids: NDArray[np.int32]  # [Lr], with the end token if finish_reason is "stop" and stop_string is empty
    rollout_logprobs: NDArray[np.float32]  # [Lr], reported by the engine; 0 at tokens that the policy did not write
    finish_reason: str  # "stop" or "length": how the policy's last turn ended
    weight_version: int  # number of weight syncs before the engine sampled the first token
    text: str  # the decoded response, without special tokens; up to the stop string, if one ended it
    dialogue: Dialogue | None = None  # None: one turn, written by the policy alone
    later_versions: tuple[tuple[int, int], ...] = ()  # (first token, weight version) after each sync during it
    # the text of `rollout.stop` that ended the policy's last turn, or ""; None without `rollout.stop`
    stop_string: str | None = None
    # [start, stop) of the tokens with which the engine ended a thought, for each ended one: the policy did not write
    # them. None without `rollout.max_thinking_tokens`
    forced: tuple[tuple[int, int], ...] | None = None
    # [Lp + Lr - 1, M, k], with `rollout.routing_replay: engine`: experts that the engine took for prompt and response
    routes: Routes | None = None
    # the trajectory's other samples, in order, if it has several: each has the context it was sampled in as
    # `prompt.token_ids`, and tokens, log-probs, versions, routes and `written` of its own. This rollout has the
    # trajectory's last turn: its `finish_reason`, text and rewards are the trajectory's
    branches: tuple[Rollout, ...] = ()

    __eq__ = _equal

    def __post_init__(self) -> None:
        _keep_as(self, response_ids=np.int32, rollout_logprobs=np.float32)

    @property
    def written(self) -> NDArray[np.bool_]:
        """[Lr]: whether the policy wrote each token of the response."""
        if self.dialogue is not None:
            return self.dialogue.written
        written = np.ones(len(self.response_ids), bool)
        for start, stop in self.forced or ():
            written[start:stop] = False
        return written

    @property
    def length(self) -> int:
        """The number of tokens that the policy wrote."""
        return int(self.written.sum()) if self.dialogue or self.forced else len(self.response_ids)

    @property
    def samples(self) -> tuple[Rollout, ...]:
        """The samples of the trajectory in the order of its turns: the branches, then this rollout."""
        return (*self.branches, self)

    def spread(self, row: NDArray[Any], fill: float) -> tuple[NDArray[Any], ...]:
        """Return rows [Lr] of this rollout, then of its branches, for a row [n] of the tokens that the policy wrote in
        all `samples`. Other tokens have the value `fill`."""
        parts = np.split(row, np.cumsum([sample.length for sample in self.branches], dtype=np.int64))
        rows = [np.full(len(sample.response_ids), fill, row.dtype) for sample in self.samples]
        for whole, sample, part in zip(rows, self.samples, parts, strict=True):
            whole[sample.written] = part
        return rows[-1], *rows[:-1]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The policy's turns in this sample. A response without a dialogue is one turn."""
        return (Turn(0, len(self.response_ids)),) if self.dialogue is None else self.dialogue.turns

    @property
    def token_versions(self) -> NDArray[np.int32]:
        """[Lr]: the weight version that sampled each token."""
        starts, versions = zip((0, self.weight_version), *self.later_versions, strict=True)
        return np.repeat(np.array(versions, np.int32), np.diff([*starts, len(self.response_ids)]))


@dataclass(frozen=True, eq=False)
class PartRewards:
    """Rewards of the turns and tokens of a trajectory: weighted sums over functions with `per: turn` or `per: token`.

    >>> PartRewards(outcome=0.5, by_turn={"step": (1.0,)}, turns=(2.0,)).tokens  # `step` has the weight 2
    ()
    """

    outcome: float  # the trajectory's reward without the rewards of tokens; NaN: none
    by_turn: dict[str, tuple[float | None, ...]] = field(default_factory=dict)  # by function, before weights
    # one for each turn of `Rollout.samples`, with the scheduler's reward; None: no reward. (): no function per turn
    turns: tuple[float | None, ...] = ()
    # [Lr] of the rollout, then of each branch; NaN: no reward. (): no function per token
    tokens: tuple[NDArray[np.float64], ...] = ()


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its rewards.

    >>> scored = [ScoredRollout(right, {"exact": 1.0}, reward=1.0), ScoredRollout(cut, {"exact": 0.0}, reward=0.0)]
    """

    rollout: Rollout
    rewards: dict[str, float | None]  # by reward function; None where a function could not score
    reward: float  # weighted sum; NaN if no function could score
    extra: dict[str, Any] = field(default_factory=dict)  # by FUNCTION/column: `log_extra` of this response
    logged: dict[str, float] = field(default_factory=dict)  # by FUNCTION/name: `log_metric` of the call that scored it
    parts: PartRewards | None = None  # None: no function gave rewards of turns or tokens
    # with `advantage_by` token or process, [Lr] of the rollout, then of each branch: what is added to the trajectory's
    # advantage
    token_advantages: tuple[NDArray[np.float32], ...] = ()

    @property
    def role(self) -> str:
        """The role whose turns the sample has; "" without roles."""
        return self.rollout.dialogue.role if self.rollout.dialogue else ""

    @property
    def outcome(self) -> float:
        """The reward without the rewards of tokens; NaN: none."""
        return self.reward if self.parts is None else self.parts.outcome

    @property
    def turn_rewards(self) -> tuple[float | None, ...]:
        """The reward of each turn of `Rollout.samples`, of functions and of the scheduler; None: no reward."""
        if self.parts is not None and self.parts.turns:
            return self.parts.turns
        return tuple(turn.reward for sample in self.rollout.samples for turn in sample.turns)

    @property
    def branches(self) -> list[ScoredRollout]:
        """The further samples of the trajectory, each with the trajectory's rewards and with its own tokens' rewards
        and advantages."""
        branches = []
        for number, rollout in enumerate(self.rollout.branches, 1):
            own = slice(number, number + 1)
            parts = self.parts and replace(self.parts, tokens=self.parts.tokens[own])
            advantages = self.token_advantages[own]
            branches.append(replace(self, rollout=rollout, parts=parts, token_advantages=advantages))
        return branches


class WeightSyncError(RuntimeError):
    """New weights did not reach the engine completely. The message names the rank and the tensor. The engine stays
    paused; a retry may succeed."""
