"""Steps dumped without a run: the samples of `megagrpo verify` with random rewards, through the policy and the loss of
a config."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tiny_policy import SHAPES

from megagrpo.algorithms.advantages import to_samples
from megagrpo.algorithms.entropy import adapt_bonus, bonus_coefficient
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.algorithms.token_advantages import with_token_advantages
from megagrpo.config import ParallelSection, RunConfig
from megagrpo.data.packing.readings import with_readings, with_teachers
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.data.packing.sample_packing import SampleShapes, build_batch, pack, packing_rules, plan_packing
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.families.hf_config import HfConfig, load_hf_config
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.progress_hook import SILENT
from megagrpo.policy.critic import Critic
from megagrpo.policy.layers.scalar_head import SCORE
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.moe.rank_routed_experts import with_sample_routes
from megagrpo.policy.moe.routing_replay import route_shape
from megagrpo.policy.reference import Reference
from megagrpo.policy.step_terms import add_step_terms
from megagrpo.proof.verify.shrink import random_routes, random_samples, random_tensor, shrink_model
from megagrpo.records.rows.dump import StepDumps
from megagrpo.records.rows.recorder import TrainedRollouts, Update
from megagrpo.records.rows.step_metrics import values_of
from megagrpo.rewards.scoring import Returned, part_rewards, weighted_sum
from megagrpo.train_types import Metric, TrainSample, TrainState
from megagrpo.trainer.policy_update import Learning
from megagrpo.trainer.rollout.roles import trained_members
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.trainer.teachers import load_teachers, teacher_files
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout, Turn
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, fill
from megagrpo.weights.bridge.adapter_files import fill_adapters
from megagrpo.weights.bridge.load import load_hf

FUNCTIONS = [dict(function="nowhere:chance"), dict(function="nowhere:coin", weight=0.5)]


def two_layers() -> HfConfig:
    """The shape of a small Llama."""
    return shrink_model(SHAPES["llama_tied"], ParallelSection())


def make_model(folder: Path, hf_config: HfConfig, seed: int = 0) -> None:
    """Save a model of this shape as a Hugging Face folder."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf_config.raw | dict(pad_token_id=None))
    )
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]  # select experts
    for tensor in (*model.parameters(), *biases):
        tensor.data.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)


def rollouts(shape: RouteShape | None = None) -> list[ScoredRollout]:
    """The samples in the form that an engine returns. There are two rewards; some responses have only one of them, one
    response has none. With `shape` they have random routes."""
    chance = random.Random(1)
    made = []
    routes = random_routes(random_samples(), shape) if shape else {}
    for i, sample in enumerate(random_samples()):
        ids = sample.token_ids.tolist()
        length, written = int(sample.response_mask.int().argmax()), tuple(sample.response_mask.tolist())
        dialogue = None if all(written[length:]) else Dialogue(written[length:], messages=(), turns=(), ended="done")
        prompt = Prompt(i, tuple(ids[:length]), "a question", {})
        logprobs = tuple(sample.rollout_logprobs[length:].tolist())
        reason = "length" if sample.truncated else "stop"
        rollout = Rollout(prompt, tuple(ids[length:]), logprobs, reason, 1, "an answer", dialogue, routes=routes.get(i))
        rewards = {
            "chance": chance.random() if i != 7 else None,
            "coin": float(chance.random() < 0.5) if i % 4 != 3 else None,
        }
        summed = (
            (rewards["chance"] or 0.0) + 0.5 * (rewards["coin"] or 0.0)
            if any(r is not None for r in rewards.values())
            else math.nan
        )
        made.append(ScoredRollout(rollout, rewards, summed))
    return made


def with_turns(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """The rollouts `with_branches` as conversations: turns of one to four tokens, most with a reward, and between them
    one of three messages of an environment."""
    chance = random.Random(3)
    return [replace(s, rollout=_conversation(s.rollout, chance)) for s in with_branches(scored)]


ROLES = {"solver": 1.0, "judge": 0.5, "frozen": 0.0}


def with_roles(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """The rollouts `with_turns`, whose samples have roles: the second group no judge, some no reward."""
    chance, made = random.Random(5), []
    for i, s in enumerate(with_turns(scored)):
        names = ["solver", "frozen", *(["judge", "judge"] if i % 8 < 4 else [])]
        samples = [
            replace(sample, dialogue=replace(sample.dialogue, role=chance.choice(names)))
            for sample in s.rollout.samples
        ]
        spoken = dict.fromkeys(sample.dialogue.role for sample in samples)
        rewards = {role: chance.choice([None, 0.0, chance.random(), -chance.random()]) for role in spoken}
        main = replace(samples[-1], branches=tuple(samples[:-1]))
        main = replace(main, dialogue=replace(main.dialogue, rewards=rewards))
        known = [r for r in rewards.values() if r is not None] + ([] if math.isnan(s.reward) else [s.reward])
        made.append(ScoredRollout(main, s.rewards | rewards, sum(known) if known else math.nan))
    return made


PARTS = [
    dict(function="nowhere:steps", per="turn", weight=0.5),
    dict(function="nowhere:tokens", per="token", weight=2.0),
    dict(function="nowhere:more", per="token"),
]


def with_token_rewards(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """The rollouts `with_parts`, in which functions per token alone have a weight. A group has equal rewards."""
    return with_parts(scored, outcome=0.0)


def with_parts(scored: list[ScoredRollout], outcome: float = 1.0) -> list[ScoredRollout]:
    """The rollouts `with_turns` with the rewards of the functions `PARTS`, which may fail or reward nothing. `outcome`
    multiplies the weights of all functions but those per token."""
    chance, made = random.Random(4), []
    for s in with_turns(scored):
        turns = sum(len(sample.turns) for sample in s.rollout.samples)
        counts = [turns, *[sum(sample.length for sample in s.rollout.samples)] * 2]
        returned = [
            Returned("chance", "trajectory", outcome, s.rewards["chance"], None),
            Returned("coin", "trajectory", 0.5 * outcome, s.rewards["coin"], None),
        ]
        for function, count in zip(PARTS, counts, strict=True):
            row = [chance.choice([None, 0.0, chance.random(), -chance.random()]) for _ in range(count)]
            row = [0.25] * count if not outcome and len(made) < 4 else row
            value, failed = weighted_sum(row, [1.0] * count), outcome and chance.random() < 0.1
            weight = function.get("weight", 1.0) * (1.0 if function["per"] == "token" else outcome)
            about = function["function"].partition(":")[2], function["per"], weight
            returned.append(Returned(*about, -1.0 if failed else value, None if failed else row))
        reward = weighted_sum([r.value for r in returned], [r.weight for r in returned])
        parts, rewards = part_rewards(s.rollout, returned), {r.name: r.value for r in returned}
        made.append(replace(s, rewards=rewards, reward=math.nan if reward is None else reward, parts=parts))
    return made


def _conversation(rollout: Rollout, chance: random.Random) -> Rollout:
    ids, written, turns = list(rollout.response_ids), [False] * len(rollout.response_ids), []
    start = 0
    while start < len(ids):
        stop = min(start + chance.randint(1, 4), len(ids))
        written[start:stop] = [True] * (stop - start)
        turns.append(Turn(start, stop, chance.choice([None, 0.0, 1.0, chance.random()])))
        ids[stop : stop + 2] = [chance.randint(3, 5)] * len(ids[stop : stop + 2])
        start = stop + 2
    logprobs = np.where(written, np.minimum(rollout.rollout_logprobs, -3.0), 0.0)
    branches = tuple(_conversation(branch, chance) for branch in rollout.branches)
    dialogue = Dialogue(written, messages=(), turns=tuple(turns), ended="done")
    return replace(rollout, response_ids=ids, rollout_logprobs=logprobs, dialogue=dialogue, branches=branches)


def with_branches(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """The rollouts, two of three of them with one or two further samples, some of them truncated or with a tool's
    tokens."""
    more = [s.rollout for s in rollouts()]
    counts = [(i + 1) % 3 for i in range(len(scored))]
    return [
        replace(s, rollout=replace(s.rollout, branches=tuple(more[(5 * i + 3 * k) % len(more)] for k in range(count))))
        for i, (s, count) in enumerate(zip(scored, counts, strict=True))
    ]


def branches_of(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """The further samples of all trajectories."""
    return [branch for s in scored for branch in s.branches]


def _with_row(sample: TrainSample, scored: ScoredRollout) -> TrainSample:
    """The sample with what its tokens add to the trajectory's advantage."""
    if not scored.token_advantages:
        return sample
    before = np.zeros(len(scored.rollout.prompt.token_ids), np.float32)
    return replace(sample, token_advantages=torch.from_numpy(np.append(before, scored.token_advantages[0])))


def taught_apart(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """The rollouts for three teachers: the first reads longer prompts, every second one a prompt of its own, the second
    teaches some prompts, and the third reads the policy's prompts."""
    made = []
    for i, s in enumerate(scored):
        prompt, group = s.rollout.prompt, i // 4
        teachers = {"policy": (3, *prompt.token_ids, 4 + i % 2, 5), "one": None if group == 1 else (), "policy_2": ()}
        made.append(replace(s, rollout=replace(s.rollout, prompt=replace(prompt, teachers=teachers))))
    return made


def _read(sample: TrainSample, scored: ScoredRollout) -> TrainSample:
    rollout = scored.rollout
    if rollout.prompt.teachers is None:
        return sample
    return with_teachers(sample, rollout.prompt.teachers, len(rollout.response_ids))


def samples_of_replicas(layout: Layout, scored: list[ScoredRollout], turns: bool = False) -> StepSamples:
    """The rollouts as the replicas sampled them in turn."""
    replica = layout.dp_rank if layout.is_dp_leader else None
    return StepSamples.of(scored, np.arange(len(scored)) % layout.dp_size, replica, turns=turns)


def dump_step(
    config: RunConfig,
    layout: Layout,
    model: Path,
    run: Path,
    steps: tuple[int, ...] = (1,),
    change: Callable[[list[ScoredRollout]], list[ScoredRollout]] = list,
) -> list[str]:
    """Dump `steps` of `config` into the folder `run`, with the model in the folder `model`; return the log messages.
    `change` makes the rollouts of the step from `rollouts`."""
    algorithm, hf = config.algorithm, load_hf_config(model)
    policy = MegatronPolicy(config, layout, hf)
    load_hf(policy.chunks, hf, model, layout)
    fill_adapters(policy.chunks, hf, layout, config.lora, seed=0)
    with torch.no_grad():
        for _, parameter, found in adapter_blocks(policy.chunks, hf, layout):
            fill(parameter, found, lambda block: random_tensor(block.name, block.shape)[block.slices])
    policy.weights_changed()
    reference = Reference(policy) if algorithm.has_reference else None
    teachers = load_teachers(config, teacher_files(algorithm.teacher, hf, layout, None), (policy, reference), SILENT)
    replay = config.rollout.routing_replay
    shape = route_shape(hf) if replay == "engine" else None
    scored, said, state = change(rollouts(shape)), [], TrainState()
    if algorithm.advantage_by_tokens:
        scored = with_token_advantages(scored, config.rollout.num_generations, algorithm)
    samples = samples_of_replicas(layout, scored, algorithm.advantage_by_turns)
    critic = _critic(config, layout, hf, model) if algorithm.has_critic else None
    learning = Learning(config, policy, reference, None, state, None, Phases(), None, (), critic)
    advantages = learning.advantages(samples)
    of_turns = learning.turn_advantages(samples, advantages)
    whole = [] if samples.columns.roles else to_samples(scored, advantages)
    if of_turns is not None:
        whole = list(samples.with_turn_advantages(dict(enumerate(whole)), of_turns).values())
    elif algorithm.advantage_by_tokens:
        whole = [_with_row(sample, s) for sample, s in zip(whole, [*scored, *branches_of(scored)], strict=True)]
        whole = list(samples.with_token_advantages(dict(enumerate(whole)), advantages.flatten().numpy()).values())
    if algorithm.advantage_by != "trajectory":
        largest = samples.largest_advantages(advantages.flatten().numpy(), of_turns)
        whole = [replace(sample, advantage=float(a)) for sample, a in zip(whole, largest, strict=True)]
    rules = packing_rules(config, policy.shares_prompts)
    if samples.columns.roles:
        shapes = samples.shapes(advantages.numpy(), rules)
        members = trained_members(samples, learning.roles(samples), np.arange(len(samples)))
        plan = plan_packing(shapes, rules, layout.dp_size, members)
        batch = build_batch(plan, layout.dp_rank, trained_samples(samples.every, [plan], layout), rules)
    else:
        whole = [_read(sample, s) for sample, s in zip(whole, [*scored, *branches_of(scored)], strict=True)]
        plan, known = plan_packing(SampleShapes.of(whole, rules), rules, layout.dp_size), dict(enumerate(whole))
        batch = pack(whole, rules, layout.dp_rank, layout.dp_size)
        batch = with_readings(batch, plan, layout.dp_rank, known, rules)
    if shape:
        batch = with_sample_routes(batch, random_routes(random_samples(), shape), layout, shape)
    batch = policy.replay.recorded(batch, policy.logprobs) if replay == "trainer" else batch
    batch = reference.annotate(batch) if reference and algorithm.beta else batch
    for teacher in teachers:
        batch = teacher.annotate(batch, step=1)
    divisor = denominator(batch, algorithm.loss.average, config.rollout.max_completion_length)
    dumps = StepDumps(policy, run / "dumps", model, said.append, reference, None, critic)
    rewarded = batch, advantages.flatten(), of_turns
    for step in steps:
        batch, advantages, of_turns = rewarded
        if algorithm.num_iterations > 1 or algorithm.kl_in_reward:
            batch = batch.with_terms(old_logprobs=policy.logprobs(batch))
        (batch,), advantages, of_turns, _ = learning.judged([batch], advantages, of_turns)
        trained = TrainedRollouts(step, samples, advantages.flatten().tolist(), of_turns)
        dumps.begin(trained)
        for _ in range(algorithm.num_iterations):
            coefficient = bonus_coefficient(state, algorithm)
            known = add_step_terms(batch, policy, divisor, coefficient)
            recording = dumps.wrap_loss(make_loss(config.algorithm))
            metrics = learning.teach_critic(known) | policy.train_step(known, recording, divisor)
            adapt_bonus(state, values_of(metrics), algorithm)
            metrics |= dict(entropy_coef=Metric(coefficient))
            dumps.after_update(Update(known, make_loss(config.algorithm), divisor, metrics))
        dumps.after_training(trained)
    return said


def _critic(config: RunConfig, layout: Layout, hf: HfConfig, model: Path) -> Critic:
    """A critic with the policy's weights and a random head."""
    critic = Critic(config, layout, hf)
    load_hf(critic.chunks, hf, model, layout)
    fill_adapters(critic.chunks, hf, layout, config.lora, seed=1)
    critic.fill_head(random_tensor(SCORE, (hf.hidden_size,)))
    return critic
