"""Run folders for the report: metrics, responses and tokens in the format of a run's own sinks."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

from megagrpo.config import ParallelSection, load_config, save_resolved
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.records.rows.run_starts import record_start
from megagrpo.records.rows.token_log import TokenLog
from megagrpo.records.sinks.sink import TrackedRun
from megagrpo.records.writer import JsonlSink
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout, Turn
from tests.unit.records.completion_rows import completion_parts

CONFIG = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
STEMS = ("sum", "add", "carry", "digit", "then", "equals", "answer", "check")
WORDS = [f"{stem}{end}" for stem in STEMS for end in ("", "s", "ing", " is", ",", ".")]
PHASES = {"generate": 6.0, "reward": 0.01, "logprobs": 0.5, "train": 4.0, "sync": 1.0}


class Texts:
    """Stands in for a tokenizer's texts: token i is the word i."""

    def of(self, token_ids) -> list[str]:
        return [f" {WORDS[token % len(WORDS)]}" for token in token_ids]


class OneRank:
    """The layout of one process."""

    world_rank = tp_rank = cp_rank = 0
    world_size = 1
    sizes = dict.fromkeys(("tp", "cp", "pp", "dp", "ep"), 1)
    parallel = ParallelSection()

    def leader_of(self, dp_rank: int) -> int:
        return dp_rank

    def all_reduce(self, values, reduction: str = "sum"):
        return values


def metrics(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    """The metrics of a step of a run that learns."""
    done = step / steps
    times = {f"time/{phase}": seconds * rng.uniform(0.9, 1.1) for phase, seconds in PHASES.items()}
    whole = sum(times.values()) + 0.05
    return {
        "reward": 0.2 + 0.7 * done + rng.gauss(0, 0.03), "reward_std": 0.4 - 0.3 * done, "reward_std_batch": 0.45 - 0.3 * done,
        "frac_reward_zero_std": 0.2 + 0.5 * done, "rewards/exact_number/mean": 0.2 + 0.7 * done, "rewards/exact_number/std": 0.3,
        "rewards/exact_number/exceptions": 0.0, "rewards/format/mean": 0.5 + 0.4 * done, "loss": rng.gauss(0, 0.01),
        "entropy": 2 * math.exp(-2 * done), "token_mult_prob_error": 1.02 + rng.uniform(0, 0.01), "gen_kl_error": 1e-4 * rng.random(),
        "policy_kl_error": 1e-4 * rng.random(), "js_divergence_error": 1e-5 * rng.random(), "grad_norm": rng.uniform(0.5, 1.5),
        "learning_rate": 1e-6 * (1 - done), "clip_ratio/low_mean": 0.001 * rng.random(), "clip_ratio/high_mean": 0.002 * rng.random(),
        "completions/mean_length": 200 + 80 * done, "completions/clipped_ratio": 0.1 * (1 - done), "num_tokens": 153600.0,
        "idle/trainer": 0.5, "idle/servers": 0.4, "tokens_per_second": 153600 / whole, "memory_gb": 40 + 2 * done,
        "mismatch/alarms": 0.0, "train/skipped_steps": 0.0, "checkpoint/failures": 0.0, **times, "time/step": whole,
    }  # fmt: skip


def rollouts(step: int, groups: int, size: int, length: int, rng: random.Random) -> list[ScoredRollout]:
    """Scored rollouts of a step, whose responses are random words."""
    made = []
    for group in range(groups):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {step} + {group}?"},
        ]
        prompt = Prompt(group, (1, 2), messages)
        for _ in range(size):
            tokens = tuple(rng.randrange(len(WORDS)) for _ in range(length))
            logprobs = tuple(-rng.expovariate(2) for _ in tokens)
            reward, cut = float(rng.random() < 0.5), rng.random() < 0.2
            text = "".join(f" {WORDS[token]}" for token in tokens)
            rollout = Rollout(prompt, tokens, logprobs, "length" if cut else "stop", step, text)
            made.append(ScoredRollout(rollout, {"exact_number": reward, "format": 1.0}, reward))
    return made


def advantages(scored: list[ScoredRollout], size: int) -> list[float]:
    """Rewards minus the mean of their group."""
    values = []
    for start in range(0, len(scored), size):
        rewards = [s.reward for s in scored[start : start + size]]
        values += [reward - sum(rewards) / size for reward in rewards]
    return values


def make_run(
    folder: Path,
    steps: int = 6,
    groups: int = 4,
    size: int = 4,
    length: int = 12,
    seed: int = 0,
    overrides: tuple = (),
    evaluate: bool = True,
) -> Path:
    """Write a run's folder through the sinks of a run."""
    rng = random.Random(seed)
    options = (
        f"run.max_steps={steps}",
        f"rollout.num_generations={size}",
        "run.trackers=[]",
        "run.log_completions_steps=0",
    )
    config = load_config(CONFIG, [f"run.name={folder.name}", *options, *overrides])
    save_resolved(config, folder)
    writer = JsonlSink(TrackedRun(folder, config))
    record_start(folder, 0, OneRank(), "bfloat16")  # type: ignore[arg-type]
    tokens = TokenLog(OneRank(), Texts(), 1, size, print)  # type: ignore[arg-type]
    tokens.open(folder, 0)
    writer.message(f"{config.run.name}: a model in float32 on 1 rank(s)")
    if evaluate:
        writer.evaluation(0, {"eval/pass@1": 0.25, "eval/reward": 0.25})
    for step in range(1, steps + 1):
        scored = rollouts(step, groups, size, length, rng)
        values = advantages(scored, size)
        writer.store(completion_parts(step, scored, values))
        trained = TrainedRollouts(step, StepSamples.of(scored), values)
        tokens.begin(trained)
        for i in tokens._chosen:
            noisy = [round(value + rng.gauss(0, 0.03), 3) for value in scored[i].rollout.rollout_logprobs.tolist()]
            tokens._values[i] = (noisy, [0.5] * length)
        tokens.finish(trained)
        writer.step(step, metrics(step, steps, rng))
        if evaluate and step % max(1, steps // 3) == 0:
            writer.evaluation(
                step, {"eval/pass@1": 0.25 + 0.7 * step / steps, "eval/reward": 0.25 + 0.7 * step / steps}
            )
    writer.message(f"finished {steps} steps")
    writer.close()
    tokens.close()
    return folder


def append(file: Path, row: dict) -> None:
    """Append a row to a JSONL file, lone surrogates as escapes."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


BEGAN = 1.75e9  # seconds since 1970
QUESTION = "A shop has 17 crates of 24 bottles and sells 39 bottles. How many bottles are left?"


def called(name: str, arguments: dict, text: str = "", call_id: str | None = None) -> dict:
    """A message of the policy with a tool call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call if call_id is None else call | {"id": call_id}]}


def timed(turns: list[Turn], at: float) -> list[Turn]:
    """Turns one after the other, of which the first begins `at` seconds after BEGAN."""
    spent = [turn.generated + turn.answered for turn in turns]
    return [replace(turn, began=BEGAN + at + sum(spent[:i])) for i, turn in enumerate(turns)]


def talk(messages: list[dict], turns: list[Turn], ended: str = "done", **more) -> Dialogue:
    """A dialogue of which the policy wrote the tokens of `turns`."""
    written = [any(turn.start <= i < turn.stop for turn in turns) for i in range(turns[-1].stop)]
    return Dialogue(written, tuple(messages), tuple(turns), ended, **more)


def conversations(rng: random.Random) -> list[tuple[Dialogue, float]]:
    """Conversations of a group with their rewards: a right answer, a failed call, a time-out, one turn."""
    error = {"role": "tool", "name": "calculator", "content": '{"error": "name \'x\' is not defined"}'}

    def turn(start: int, stop: int, **facts) -> Turn:
        queued = round(rng.uniform(0, 0.2), 3)
        return Turn(start, stop, generated=queued + round(rng.uniform(0.2, 1.2), 3), queued=queued, **facts)

    first = called("calculator", {"expression": "17*24"}, "Multiply first, then subtract what is sold.")
    second = called("calculator", {"expression": "408-39"})
    results = [{"role": "tool", "name": "calculator", "content": number} for number in ("408", "369")]
    right = talk(
        [first, results[0], second, results[1], {"role": "assistant", "content": "369 bottles are left."}],
        timed(
            [
                turn(0, 34, calls=("calculator",), answered=0.021),
                turn(46, 61, calls=("calculator",), answered=1.31),
                turn(73, 84),
            ],
            0.45,
        ),
        rewards={"environment": 1.0},
    )
    wrong = talk(
        [called("calculator", {"expression": "x*24"}), error, {"role": "assistant", "content": "About 400."}],
        [turn(0, 18, calls=("calculator",), failures=1, answered=0.018, reward=-0.5), turn(37, 42, reward=0.25)],
        retries=1,
    )
    slow = talk(
        [called("search", {"query": "bottles " * 300})], [turn(0, 29, calls=("search",), answered=20.0)], "time_limit"
    )
    return [
        (right, 1.0),
        (wrong, 0.0),
        (slow, 0.0),
        (talk([{"role": "assistant", "content": "369"}], [turn(0, 3)]), 1.0),
    ]


def branch_rows() -> list[dict]:
    """Rows of the further samples of a trajectory: one leaves it at its prompt, one after its first tool result."""
    draft = talk(
        [{"role": "assistant", "content": "Plan: multiply, then subtract."}], timed([Turn(0, 9, generated=0.4)], 0)
    )
    critic = talk(
        [
            called("calculator", {"expression": "17*24"}),
            {"role": "tool", "name": "calculator", "content": "408"},
            {"role": "assistant", "content": "The product is right."},
        ],
        timed([Turn(0, 12, calls=("calculator",), generated=0.5, answered=0.02), Turn(20, 27, generated=0.3)], 1.0),
    )
    review = {"role": "user", "content": "Check the product before you go on."}
    rows = [(draft, 1, [{"role": "user", "content": "Make a plan first."}], 38), (critic, 4, [review], 131)]
    return [
        {"prompt_tokens": tokens, "shared_messages": shared, "prompt": context, "completion": "", "num_tokens": int(dialogue.written.sum()),
         "finish_reason": "stop", "weight_version": 1, "dialogue": dialogue.record()}
        for dialogue, shared, context, tokens in rows
    ]  # fmt: skip


def make_conversations(folder: Path, steps: int = 3, **more) -> Path:
    """Write a run's folder whose responses are conversations. The first one of each group has branches."""
    make_run(folder, steps, **more)
    rng = random.Random(1)
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    for index, row in enumerate(lines):
        if index % 4 == 0:
            group = conversations(rng)
        dialogue, reward = group[index % 4]
        own = int(dialogue.written.sum())
        row |= {"dialogue": dialogue.record(), "reward": reward, "num_tokens": own, "advantage": 2 * reward - 1}
        row |= {"finish_reason": "stop", "completion": dialogue.messages[-1]["content"], "rewards": {"answer": reward}}
        row["prompt"][-1]["content"] = QUESTION
        if index % 4 == 0:
            row["num_tokens"] += sum(branch["num_tokens"] for branch in branch_rows())
            row["branches"] = branch_rows()
            row["turn_advantages"] = [-0.2, 0.4, 0.6, 0.9, -0.3, 1.2]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    metrics_file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    for row in rows:
        if "reward" in row:
            tools = 0.5 - 0.05 * row["step"]
            row |= {"idle/tools": tools, "idle/slots": 0.1, "idle/generation": 0.9 - tools, "multi_turn/ended/failed": 0.0,
                    "multi_turn/ended/done": 0.75, "multi_turn/ended/time_limit": 0.25,
                    "multi_turn/turn_seconds/mean": 0.8, "multi_turn/tool_seconds/mean": 1.6}  # fmt: skip
    metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
