"""One row per loss: the allowed values of `algorithm.loss_type`, and what the rest of a run needs to know of each.

Config rules, denominators, metrics, the terms of the whole step and `megagrpo audit` read the row. No other module
lists names of losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Average = Literal["tokens", "sequence_means", "sequence_sums", "fixed_length"]


@dataclass(frozen=True)
class Loss:
    """One loss: its policy term, how its tokens are averaged, and how it behaves towards other options."""

    # function in algorithms/policy_losses.py and, in float64, in proof/audit/naive_loss.py; or the user's FILE.py:NAME
    policy_term: str
    # tokens; means of samples; sums of samples; tokens over samples x max_completion_length
    average: Average
    # "ratio": epsilon, epsilon_high, delta. "weight": epsilon_high is its maximum
    clips: Literal["ratio", "weight", "nothing"] = "nothing"
    local: bool = True  # with a ratio per token, the gradient at a token depends on that token alone
    own_ratio: bool = False  # the loss builds the ratio of a sequence itself: importance_sampling_level must be token
    own_correction: bool = False  # the policy term contains the weights of importance_correction
    custom: bool = False  # a loss of the user's own
    method: str = "grpo"  # what trains with it: a row of `trainer/methods/method_table.py`
    group: int = 1  # responses of a row, which must be in one micro-batch
    reference: bool = True  # with beta > 0 it compares with the reference model
    arguments: Mapping[str, float] = field(default_factory=dict)  # names and defaults of `algorithm.loss_args`
    whole_step: bool = False  # it compares log-probs of the whole step, which a pass before the update computes

    @property
    def generates(self) -> bool:
        """Whether the method samples responses; the others learn from the responses of rows."""
        return self.method == "grpo"


LOSSES = {
    "grpo": Loss("clipped", "sequence_means", clips="ratio"),
    "bnpo": Loss("clipped", "tokens", clips="ratio"),
    "dapo": Loss("clipped", "tokens", clips="ratio"),
    "dr_grpo": Loss("clipped", "fixed_length", clips="ratio"),
    "luspo": Loss("clipped", "sequence_sums", clips="ratio"),
    "cispo": Loss("cispo", "tokens", clips="weight"),
    "sapo": Loss("sapo", "sequence_means"),
    "vespo": Loss("vespo", "tokens", local=False, own_ratio=True, own_correction=True),
    "gmpo": Loss("gmpo", "sequence_means", local=False, own_ratio=True),
    "fipo": Loss("fipo", "tokens", clips="ratio", local=False),
}

# Losses on responses of rows: `megagrpo sft` (docs/sft_and_preferences.md).
ROW_LOSSES = {"sft": Loss("sft", "tokens", method="sft", reference=False)}
# Losses on pairs: `megagrpo dpo`, with the arguments and defaults of `algorithm.loss_args`.
_PAIRS: dict[str, dict[str, float]] = {
    "sigmoid": {"label_smoothing": 0.0},
    "sigmoid_norm": {},
    "hinge": {},
    "ipo": {},
    "robust": {"label_smoothing": 0.1},
    "exo_pair": {"label_smoothing": 0.001},
    "nca_pair": {},
    "sppo_hard": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"tau": 0.05},
    "simpo": {"gamma": 0.5, "label_smoothing": 0.0},
    "orpo": {},
    "bco_pair": {},
    "aot": {"label_smoothing": 0.0},
    "aot_unpaired": {"label_smoothing": 0.0},
    "kto": {"desirable_weight": 1.0, "undesirable_weight": 1.0},  # its pair: a response, and one to another prompt
}
ROW_LOSSES |= {
    name: Loss(
        name,
        "sequence_sums",
        local=False,
        method="dpo",
        group=2,
        reference=name not in ("simpo", "orpo"),
        arguments=own,
        whole_step=name in ("aot", "aot_unpaired", "kto"),
    )
    for name, own in _PAIRS.items()
}
ROW_LOSSES["bradley_terry"] = Loss(
    "bradley_terry",
    "sequence_sums",
    local=False,
    method="reward",
    group=2,
    reference=False,
    arguments={"center": 0.0},
)


def custom_loss(name: str, average: Average | None) -> Loss:
    """Return the row of a user's loss `FILE.py:NAME` or `package.module:NAME`.

    `local` only says that the loss gradient may be predicted ahead of the backward pass, which checks the prediction.
    """
    return Loss(name, average or "tokens", custom=True)
