"""One optimizer step of `MegatronPolicy` beside the same step of transformers' LlamaForCausalLM, in one process, on
SmolLM2-135M's shapes.

    python benchmarks/train_step.py --dtype fp32 --threads 1

Both sides take the same samples, forward, backward and AdamW step, from random weights on both sides. The loss is the
policy gradient over response tokens, - sum(advantage * logprob) / number of response tokens. Three contenders:

- megagrpo: `MegatronPolicy.train_step`, packing included; logits at response tokens only, gradient sums and master
  weights in float32.
- full logits: transformers with sdpa attention, right-padded micro-batches, log_softmax over the logits of every
  position, gradients accumulated by autograd, `clip_grad_norm_`, fused AdamW. In bf16 its weights, gradient sums and
  optimizer state are bf16 too, which is less work and less exact than ours.
- response logits: the same with `logits_to_keep`: logits from the first response token of the micro-batch on.

Three kinds of samples: of one length, of mixed lengths, and groups of 8 that share a prompt, as GRPO makes them (of one
length; megagrpo computes the prompt once). Micro-batches hold at most `--max-tokens` real tokens on both sides. Both
sides run under the settings that megagrpo makes for this machine's matrix products. Tokens per second count the tokens
of all samples, not padding.

Each contender takes warm-up steps until two in a row agree in CPU time (`repeats.py`; a `!` marks a warm-up that ended
at its limit). Then the contenders take `--repeats` steps in turn, in alternating order. The table has the medians and
in `spread` the distance between the largest and the smallest over the median. A ratio is taken within each turn; its
median stands before its smallest and largest value.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megagrpo.platform.process.variables import OPENMP

os.environ |= OPENMP | os.environ  # read once, when torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file sees only its own folder

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.repeats import RULE, is_warm, spread, warm_up_text, with_range
from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import PackingRules, assign, pack
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import LossInputs, LossOutput, TrainSample

SMOLLM2_135M: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    initializer_range=0.02,
)
LEARNING_RATE, BETAS, EPSILON, MAX_NORM = 1e-6, (0.9, 0.95), 1e-8, 1.0
GROUP = 8
KINDS = ("equal", "mixed", "groups")


class Contender(Protocol):
    """Takes optimizer steps; returns the loss before each step."""

    name: str

    def step(self, samples: Sequence[TrainSample]) -> float: ...


class Megagrpo:
    name = "megagrpo"

    def __init__(self, precision: str, max_tokens: int, hf_config: dict[str, Any] = SMOLLM2_135M, **train: object):
        config = RunConfig.model_validate(
            {
                "model": {"path": "random", "precision": precision},
                "data": {"train": {"source": "none"}},
                "rewards": {"functions": [{"function": "exact_number"}]},
                "train": {
                    "learning_rate": LEARNING_RATE,
                    "adam_beta2": BETAS[1],
                    "adam_epsilon": EPSILON,
                    "max_grad_norm": MAX_NORM,
                    "distributed_optimizer": False,
                    **train,
                },
            }
        )
        self.policy = MegatronPolicy(config, init_layout(config.parallel), parse_hf_config(hf_config))
        self.rules = PackingRules(max_tokens=max_tokens, share_prompts=True)

    def step(self, samples: Sequence[TrainSample]) -> float:
        batch = pack(samples, self.rules)
        return self.policy.train_step(batch, policy_gradient, batch.num_tokens)["loss"].value


def policy_gradient(inputs: LossInputs) -> LossOutput:
    """The loss: - sum over response tokens of advantage * logprob."""
    rows = inputs.micro_batch
    return LossOutput(numerator=-(inputs.policy_logprobs * rows.advantages * rows.loss_mask).sum(), metrics={})


class Transformers:
    def __init__(self, dtype: torch.dtype, max_tokens: int, response_logits: bool):
        from transformers import LlamaConfig, LlamaForCausalLM

        self.name = "transformers, response logits" if response_logits else "transformers, full logits"
        self.rules, self.response_logits = PackingRules(max_tokens=max_tokens), response_logits
        config = LlamaConfig(**SMOLLM2_135M)
        config._attn_implementation = "sdpa"
        self.model = LlamaForCausalLM(config).to(dtype).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True
        )

    def step(self, samples: Sequence[TrainSample]) -> float:
        num_tokens = sum(int(s.response_mask.sum()) for s in samples)
        self.optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for indices in assign([s.token_ids.numel() for s in samples], self.rules, num_ranks=1):
            loss = self._loss([samples[i] for i in indices]) / num_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return total

    def _loss(self, samples: Sequence[TrainSample]) -> Tensor:
        ids = pad_sequence([s.token_ids for s in samples], batch_first=True)  # [S, L]
        is_response = pad_sequence([s.response_mask for s in samples], batch_first=True)[:, 1:]
        advantages = torch.tensor([s.advantage for s in samples])[:, None]
        lengths = torch.tensor([s.token_ids.numel() for s in samples])[:, None]
        attention_mask = None if bool((lengths == ids.shape[1]).all()) else torch.arange(ids.shape[1]) < lengths
        keep = ids.shape[1] - int(is_response.any(0).nonzero()[0]) if self.response_logits else 0  # 0: all
        logits = self.model(input_ids=ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=keep).logits[
            :, :-1
        ]
        width = logits.shape[1]
        labels, is_response = ids[:, -width:], is_response[:, -width:]
        logprobs = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return -(logprobs * advantages * is_response).sum()


def make_samples(count: int, prompt: int, response: int, kind: str) -> list[TrainSample]:
    """`count` samples of random tokens. Mixed: prompt and response lengths are uniform between a quarter of the given
    lengths and all of them."""
    draw = random.Random(0)

    def tokens(most: int) -> Tensor:
        length = draw.randint(max(1, most // 4), most) if kind == "mixed" else most
        return torch.tensor([draw.randrange(SMOLLM2_135M["vocab_size"]) for _ in range(length)])

    samples = []
    for i in range(count):
        if kind != "groups" or i % GROUP == 0:
            question = tokens(prompt)
        ids = torch.cat([question, tokens(response)])
        is_response = torch.arange(ids.numel()) >= question.numel()
        samples.append(TrainSample(ids, is_response, torch.zeros(ids.numel()), draw.uniform(-1, 1)))
    return samples


@dataclass
class Steps:
    """The measured steps of a contender: wall and CPU seconds of each, and the loss before the last one. `warm_ups` are
    the CPU seconds of the steps before them."""

    warm_ups: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: float = 0.0


def measure(contenders: Sequence[Contender], samples: Sequence[TrainSample], repeats: int) -> dict[str, Steps]:
    """Return the steps of each contender, by its name: first each one's warm-up, then `repeats` turns."""
    results = {c.name: Steps() for c in contenders}

    def step(contender: Contender) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        results[contender.name].loss = contender.step(samples)
        return time.perf_counter() - wall, time.process_time() - cpu

    for contender in contenders:
        while not is_warm(results[contender.name].warm_ups):
            results[contender.name].warm_ups.append(step(contender)[1])
    for turn in range(repeats):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            wall, cpu = step(contender)
            results[contender.name].wall.append(wall)
            results[contender.name].cpu.append(cpu)
    return results


def row(kind: str, name: str, steps: Steps, ours: Steps, tokens: int) -> str:
    """Return the table's row of a contender."""
    wall, cpu = statistics.median(steps.wall), statistics.median(steps.cpu)
    ratios = (
        "" if steps is ours else with_range([a / b for a, b in zip(theirs, own, strict=True)])
        for theirs, own in ((steps.wall, ours.wall), (steps.cpu, ours.cpu))
    )
    cells = (
        f"{kind}: {name}",
        warm_up_text(steps.warm_ups),
        f"{wall:.2f}",
        f"{spread(steps.wall):.0%}",
        f"{cpu:.2f}",
        f"{spread(steps.cpu):.0%}",
        f"{tokens / wall:.1f}",
        f"{tokens / cpu:.1f}",
        *ratios,
        f"{steps.loss:.4f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=32, help="samples of one optimizer step")
    parser.add_argument("--prompt", type=int, default=40, help="tokens of a prompt (the most, with mixed lengths)")
    parser.add_argument("--response", type=int, default=24, help="tokens of a response (the most, with mixed lengths)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    device.install()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = device.resolve_precision(args.dtype)
    contenders: list[Contender] = [
        Megagrpo(args.dtype, args.max_tokens),
        Transformers(dtype, args.max_tokens, response_logits=False),
        Transformers(dtype, args.max_tokens, response_logits=True),
    ]
    print(
        f"{args.dtype}, {args.threads} threads, {args.samples} samples of {args.prompt} + {args.response} tokens, "
        f"micro-batches of at most {args.max_tokens}, {RULE}, median of {args.repeats}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| | warm-ups | s/step | spread | CPU s | spread | tokens/s | tokens/CPU s | /ours | CPU | loss |")
    print("|---" * 11 + "|")
    for kind in args.kinds:
        samples = make_samples(args.samples, args.prompt, args.response, kind)
        tokens = sum(s.token_ids.numel() for s in samples)
        results = measure(contenders, samples, args.repeats)
        for name, steps in results.items():
            print(row(kind, name, steps, results[Megagrpo.name], tokens), flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
