"""Options of a step and layouts of at most four ranks, as the axes of one covering set: every two values that the
config accepts together meet in a row. A row's step must equal one process's step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covering import Row, Rule, cheaper, covering_rows
from ranks import run_ranks
from tiny_policy import SHAPES, tiny_run

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.data.packing.sample_packing import padded
from megagrpo.families.hf_config import HfConfig
from megagrpo.policy.lora.quantized_base import STORED_BLOCK
from megagrpo.proof.verify.shrink import plainly, random_samples, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, distances, silent_tensors
from megagrpo.train_types import TrainSample

MAX_RANKS = 4
LARGEST = ParallelSection(tp=2, pp=2, vpp=2, ep=2, etp=2)
IMAGES = "qwen3_vl"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo", beta=0.1),
    "dr_grpo, reverse KL": dict(loss_type="dr_grpo", beta=0.1, kl_estimator="full_reverse"),
    "dapo, forward KL": dict(loss_type="dapo", beta=0.1, kl_estimator="full_forward"),
    "bnpo, corrected k1": dict(loss_type="bnpo", beta=0.1, kl_estimator="k1", use_bias_correction_kl=True),
    "gspo, sequence weights": dict(
        loss_type="grpo",
        beta=0.0,
        importance_sampling_level="sequence",
        importance_correction="sequence_truncate",
        importance_correction_max=1.05,
    ),
    "dr_grpo, teachers": dict(
        loss_type="dr_grpo",
        beta=0.0,
        teacher=[
            dict(path="policy", prompt="{hint}", divergence="jensen_shannon", mix=0.3, weight=2.0),
            dict(path="teachers/two", where={"subject": "sums"}, divergence="forward"),
            dict(path="teachers/three", divergence="skewed_reverse", mix=0.2, over=6),
            dict(path="teachers/four", prompt="{hint}", where={"subject": "sums"}, over="sampled", weight=0.5),
        ],
    ),
    "top entropy, bonus": dict(loss_type="dapo", beta=0.1, entropy_coef=0.5, top_entropy_quantile=0.5),
}
LOSSES["dapo, critic"] = dict(
    loss_type="dapo",
    beta=0.0,
    advantage_estimator="gae",
    critic=dict(learning_rate=1e-2, gamma=0.97, gae_lambda=0.9, value_clip=None),
)
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": dict(rank=3),
    "first layer": dict(rank=2, target_modules=["o_proj", "down_proj"], layers_to_transform=[0]),
    "experts": dict(rank=3, target_parameters=BOTH),
}
STAGES: dict[str, dict[str, Any]] = {  # of four layers, but for one stage
    "one": {},
    "two": dict(pp=2),
    "virtual": dict(pp=2, vpp=2),
    "uneven": dict(pp=3, pipeline_layers=[1, 2, 1]),
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": dict(top_p=0.7, top_k=40, min_p=0.01),
    "processed": dict(logit_bias={3: 2.0, 70: 1.0}, repetition_penalty=1.3),
    "of rows": {},
}
OF_ROWS: list[dict[str, Any]] = [  # parameters of each prompt's samples
    dict(top_k=30, temperature=0.6),
    dict(min_p=0.02, repetition_penalty=1.2, logit_bias={5: 1.5, 71: 1.0}),
    dict(top_p=0.8),
    {},
]
ROUTERS: dict[str, dict[str, Any]] = {  # of the section algorithm
    "plain": {},
    "losses": dict(router_aux_loss_coef=0.1),
    "biases": dict(moe_router_bias_update_rate=0.25),
    "frozen": {},
}
EXPERTS = ("qwen3_moe", "deepseek_v3")
EXACT_KL = ("dr_grpo, reverse KL", "dapo, forward KL", "dr_grpo, teachers")
# Their order decides the number of rows: this one gives few.
AXES: dict[str, list[Any]] = {
    "stages": list(STAGES),
    "packing": ["roomy", "tight", "shared", "shared, tight"],  # two of the longest sample in a micro-batch, or one
    "loss": list(LOSSES),
    "tp": [1, 2],
    "storage": ["none", "nf4"],
    "offload": [0.0, 0.5],
    "routes": ["off", "engine", "trainer"],
    "sampler": list(SAMPLERS),
    "sequence_parallel": [False, True],
    "cp": [1, 2],
    "ep": [1, 2],
    "dp": [1, 2],
    "overlap_grad_reduce": [False, True],
    "adapters": list(ADAPTERS),
    "recompute": ["none", "selective", "full"],
    "etp": [None, 1, 2],
    "model": ["llama_tied", "qwen2_untied", "one_kv_head", *EXPERTS, IMAGES],
    "optimizer": ["adam", "sharded", "muon"],
    "router": list(ROUTERS),
}
RULES: list[Rule] = [
    (("tp", "stages", "cp", "dp"), lambda tp, stages, cp, dp: tp * STAGES[stages].get("pp", 1) * cp * dp <= MAX_RANKS),
    (("tp", "sequence_parallel"), lambda tp, sequence_parallel: tp > 1 or not sequence_parallel),
    (("model", "ep", "etp"), lambda model, ep, etp: model in EXPERTS or (ep == 1 and etp is None)),
    (
        ("model", "tp", "sequence_parallel"),
        lambda model, tp, sequence_parallel: model not in EXPERTS or tp == 1 or sequence_parallel,
    ),
    (("tp", "cp", "dp", "ep", "etp"), lambda tp, cp, dp, ep, etp: tp * cp * dp % (ep * (etp or tp)) == 0),
    (("model", "adapters"), lambda model, adapters: model in EXPERTS or adapters != "experts"),
    (("model", "routes"), lambda model, routes: model in EXPERTS or routes == "off"),
    (
        ("model", "router"),
        lambda model, router: router == "plain" or model == "deepseek_v3" or (model in EXPERTS and router != "biases"),
    ),
    (("adapters", "router"), lambda adapters, router: adapters == "none" or router in ("plain", "losses")),
    (("adapters", "storage"), lambda adapters, storage: adapters != "none" or storage == "none"),
    (("adapters", "optimizer"), lambda adapters, optimizer: adapters == "none" or optimizer != "muon"),
    (("dp", "cp", "overlap_grad_reduce"), lambda dp, cp, overlaps: dp * cp > 1 or not overlaps),
    (("model", "loss"), lambda model, loss: model != IMAGES or loss != "dr_grpo, teachers"),
    # A KL over the whole vocabulary needs distributions over the same tokens
    (("loss", "sampler"), lambda loss, sampler: loss not in EXACT_KL or sampler in ("plain", "processed")),
]
# The products in FP8 round more than any layout, so that their rows prove less about other options: rows of their own.
# A scale per tensor also depends on what a rank has of it: `test_fp8.py` has these recipes in the full suite.
FP8_AXES: dict[str, list[Any]] = {axis: values[:1] for axis, values in AXES.items()} | {
    "fp8_recipe": ["blockwise", "mxfp8"],
    "model": ["qwen2_untied", "qwen3_moe"],
    "tp": [1, 2],
    "stages": ["one", "two"],
    "cp": [1, 2],
    "dp": [1, 2],
    "ep": [1, 2],
    "recompute": ["none", "full"],
    "optimizer": ["adam", "sharded"],
    "sequence_parallel": [False, True],
}


@functools.cache
def rows() -> tuple[Row, ...]:
    """Rows that contain every allowed pair of values of `AXES`."""
    return tuple(cheaper(covering_rows(AXES, RULES), AXES, RULES, ranks))


@functools.cache
def few_rows() -> tuple[Row, ...]:
    """Rows of `rows()` on few ranks, in which each value of each axis occurs."""
    left = {(axis, value) for axis, values in AXES.items() for value in values}
    chosen = []
    while left:
        chosen.append(max(rows(), key=lambda row: len(left & row.items()) / (ranks(row) + 1)))
        left -= chosen[-1].items()
    return tuple(row for row in rows() if row in chosen)


@functools.cache
def fp8_rows() -> tuple[Row, ...]:
    """Rows that contain every allowed pair of values of `FP8_AXES`."""
    return tuple(cheaper(covering_rows(FP8_AXES, RULES), FP8_AXES, RULES, ranks))


def ranks(row: Row) -> int:
    return row["tp"] * STAGES[row["stages"]].get("pp", 1) * row["cp"] * row["dp"]


def name(row: Row) -> str:
    """The values that differ from each axis's first one."""
    return " ".join(
        f"{axis}={value}" for axis, value in row.items() if axis == "model" or value != AXES.get(axis, [None])[0]
    )


@dataclass(frozen=True)
class Inputs:
    """A folder with the model that sees images, its architecture, and samples with images."""

    folder: Path
    model: HfConfig
    samples: list[TrainSample]


def samples_of(row: Row, images: Inputs) -> list[TrainSample]:
    """Two groups: two truncated responses, an advantage of 0, foreign tokens. Or samples with images."""
    drawn = images.samples if row["model"] == IMAGES else random_samples()
    samples = [drawn[index] for index in ((0, 1, 2, 4) if row["model"] == IMAGES else (0, 1, 6, 7))]
    own: list[dict[str, Any]] = OF_ROWS if row["sampler"] == "of rows" else [{}]
    prompts = {sample.index // 3: number for number, sample in enumerate(samples)}
    groups = {group: own[number % len(own)] for number, group in enumerate(prompts)}
    return [replace(sample, index=i, sampling=groups[sample.index // 3]) for i, sample in enumerate(samples)]


def model_of(row: Row, images: Inputs) -> HfConfig:
    """The row's model, with widths that blocks of stored weights and of FP8 divide. One stage has a layer of each kind:
    two."""
    if row["model"] == IMAGES:
        return images.model
    unit = STORED_BLOCK if row["storage"] != "none" else 32 if "fp8_recipe" in row else 1
    largest = LARGEST if STAGES[row["stages"]] else LARGEST.model_copy(update=dict(pp=1, vpp=1))
    return shrink_model(_raw(row["model"]), largest, unit)


def _raw(model: str) -> dict[str, Any]:
    if model == "one_kv_head":
        return SHAPES["qwen3_tied"] | dict(num_key_value_heads=1)
    if model == "deepseek_v3":
        from test_latent_parity import V3

        return V3
    return SHAPES[model]


def config_of(row: Row, longest: int) -> RunConfig:
    """The config of a row whose longest sample has this many tokens. Raises ConfigError for a forbidden row."""
    layout = {axis: row[axis] for axis in ("tp", "cp", "ep", "etp", "sequence_parallel")} | STAGES[row["stages"]]
    sees = row["model"] == IMAGES
    made = tiny_run(
        layout,
        model=dict(
            recompute=row["recompute"],
            offload_activations=row["offload"],
            base_storage=row["storage"],
            fp8_recipe=row.get("fp8_recipe", "none"),
        ),
        algorithm=LOSSES[row["loss"]] | ROUTERS[row["router"]] | dict(num_iterations=2),
        lora=ADAPTERS[row["adapters"]],
        rollout=SAMPLERS[row["sampler"]] | dict(routing_replay=row["routes"]),
        data=dict(train=dict(source="none"), images=sees)
        | (dict(sampling_column="own") if row["sampler"] == "of rows" else {}),
        train=dict(
            optimizer="muon" if row["optimizer"] == "muon" else "adam",
            distributed_optimizer=row["optimizer"] == "sharded",
            share_prompts=row["packing"].startswith("shared"),
            overlap_grad_reduce=row["overlap_grad_reduce"],
            ddp_bucket_size=3000 if row["overlap_grad_reduce"] else None,
            freeze_moe_router=row["router"] == "frozen",
        ),
    )
    budget = padded(longest * (1 if row["packing"].endswith("tight") else 2), made.micro_batch_align)
    return made.model_copy(update=dict(train=made.train.model_copy(update=dict(max_tokens_per_micro_batch=budget))))


def _take_step(
    config: RunConfig, model: HfConfig, samples: Sequence[TrainSample], folder: Path | None
) -> Outcome | None:
    """`take_step`, with the tower of `folder`, and with activations offloaded however small they are."""
    from megagrpo.policy.transformer import activation_offload
    from megagrpo.proof.verify import verified_step
    from megagrpo.trainer.policy_update import load_tower

    activation_offload.MIN_BYTES = 1
    fill = verified_step.fill_weights

    def fill_with_tower(policy: Any, *arguments: Any) -> None:
        fill(policy, *arguments)
        load_tower(policy, folder)

    if folder is not None:
        verified_step.fill_weights = fill_with_tower
    return take_step(config, model, samples)


@dataclass(frozen=True)
class Steps:
    """Steps of rows, and of one process beside them."""

    images: Inputs

    def of(self, row: Row, config: RunConfig, world: int) -> Outcome:
        """The step of a config of this row."""
        folder = self.images.folder if row["model"] == IMAGES else None
        model, samples = model_of(row, self.images), samples_of(row, self.images)
        outcome: Outcome = run_ranks(_take_step, world, config, model, samples, folder)[0]
        return outcome

    def problems(self, row: Row) -> list[str]:
        """What differs between the step of a row and the step of one process."""
        longest = max(sample.token_ids.numel() for sample in samples_of(row, self.images))
        config = config_of(row, longest)
        alone = plainly(config)
        found, one = self.of(row, config, ranks(row)), self.of(row, alone, 1)
        problems = [f"no gradient of {tensor}" for tensor in silent_tensors(one)]
        if "fp8_recipe" not in row:
            problems += [str(distance) for distance in compare(found, one) if not distance.passed]
            return problems + (["ranks disagree"] if found.disagreement else [])
        dense = alone.model_copy(update=dict(model=alone.model.model_copy(update=dict(fp8_recipe="none"))))
        exact = self.of(row, dense, 1)
        problems += [str(distance) for distance in compare(found, exact, one, coarse=True) if not distance.passed]
        # A layout bug causes an error as large as the gradient. Rounding may also send a token to another expert.
        noise, apart = distances(one, exact), distances(found, one)
        rounded = sorted(noise[key] for key in noise if key[0] == "gradient" and "_proj" in key[1])
        if not rounded[len(rounded) // 2] > 1e-2:
            problems.append("FP8 changes no gradient")
        if row["model"] not in EXPERTS and not max(apart[key] for key in apart if key[0] == "gradient") < 0.25:
            problems.append("gradients differ by more than FP8 rounds")
        return problems
