"""Defines the section `rollout`: sampling, and the vLLM servers that generate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megagrpo.config.sections.placement import Placement
from megagrpo.config.sections.section import (
    Count,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Share,
    Temperature,
)
from megagrpo.config.sections.transport_table import TransportName
from megagrpo.loopback import LOOPBACK

MOST_IDS = 1024  # of a request in vLLM's sampler on GPUs: of logit_bias, of allowed_token_ids


def _one_constraint(given: dict[str, Any]) -> dict[str, Any]:
    """Check that there is at most one constraint, and its type."""
    if len(given) > 1:
        raise ValueError(f"must name one constraint, but has {', '.join(given)}")
    for kind, value in given.items():
        texts = value if kind == "choice" and isinstance(value, list) and value else [value]
        if kind == "json" and isinstance(value, dict):
            _check_json(value)
            continue
        if kind == "json" or not all(isinstance(text, str) and text for text in texts):
            wanted = {"json": "a JSON schema as a mapping", "choice": "a list of texts that are not empty"}
            raise ValueError(f"{kind} must be {wanted.get(kind, 'a text that is not empty')}")
        if kind == "grammar" and "::=" not in value:
            raise ValueError("grammar must be in EBNF, with rules such as `root ::= ...`")
    return given


def _check_json(schema: dict[str, Any]) -> None:
    try:
        json.dumps(schema)
    except RecursionError:
        raise ValueError("json is nested too deeply; vLLM takes 64 levels") from None
    except (TypeError, ValueError) as error:  # YAML reads 2026-01-31 as a date
        raise ValueError(f"json has a value that JSON does not have: {error}; write it in quotes") from None


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty, because an empty text ends every response")
    return text


def _id_or_text(key: object) -> object:
    """Return a number for the text of one: keys of JSON, and of overrides, are always texts."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _distinct(token_ids: list[int]) -> list[int]:
    if len(set(token_ids)) < len(token_ids):
        raise ValueError("must name each token once")
    return token_ids


RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]
TokenOrText = Annotated[NonNegativeInt | Annotated[str, Field(min_length=1)], BeforeValidator(_id_or_text)]
LogitBias = Annotated[dict[TokenOrText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_IDS)]
TokenIds = Annotated[list[NonNegativeInt], Field(max_length=MOST_IDS), AfterValidator(_distinct)]
Stop = list[Annotated[str, AfterValidator(_not_empty)]]
StructuredOutputs = Annotated[dict[Literal["regex", "json", "choice", "grammar"], Any], AfterValidator(_one_constraint)]


def constraint_of(structured_outputs: Mapping[Any, Any]) -> tuple[str, str] | None:
    """Return a constraint as its kind for vLLM and its text; None without."""
    for kind, value in structured_outputs.items():
        if kind == "choice":
            return "grammar", "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        return kind, json.dumps(value) if kind == "json" else value
    return None


class KeptSection(Section):
    path: str | None = None
    """A run's folder, or a file or folder of groups in the same format: the run trains on these rollouts, scores them
    again, and starts no servers. docs/kept_rollouts.md."""
    by: Literal["step", "prompt"] = "step"
    """Which group a prompt gets: the one of the same step of the kept run, or any one of the same row of data.train."""
    to_step: PositiveInt | None = None
    """With `by` step: the run ends after this step, with the learning rates of a whole run. Empty: after the last step
    that both runs have."""

    @property
    def folder(self) -> Path:
        """`path` as a path."""
        assert self.path is not None, "the run generates"
        return Path(self.path)


class RolloutSection(Section):
    prompts_per_step: PositiveInt = 8
    """Prompts in each step."""
    num_generations: PositiveInt = 8
    """Responses to each prompt: the size of a group."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens, chat template included."""
    max_completion_length: PositiveInt = 256
    """Longest response in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer's log-probs use it too."""
    top_p: Fraction = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1 keeps all. The trainer's log-probs are
    over the tokens that it keeps, also with top_k and min_p."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most likely tokens; 0 keeps all."""
    min_p: Share = 0.0
    """Sample from the tokens that are at least this times as likely as the most likely token; 0 keeps all."""
    logit_bias: LogitBias = {}
    """Numbers that are added to logits, by token id, or by a text that is one token: `{29: -100}` bans token 29.
    Trainer and evaluation use them too. docs/sampling.md."""
    allowed_token_ids: TokenIds = []
    """The only tokens that responses may have, end tokens included; empty allows all. It also applies to evaluation."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Logits of tokens that occur in the prompt or earlier in the response are divided by this if positive, and
    multiplied if negative; 1 changes nothing."""
    structured_outputs: StructuredOutputs = {}
    """Constraint of each response, or of each turn: `{regex: TEXT}`, `{json: SCHEMA}`, `{choice: [TEXT, ...]}` or
    `{grammar: EBNF}`. Trainer and evaluation use it too. docs/sampling.md."""
    stop: Stop = []
    """Texts that end a response; special tokens such as `<|im_end|>` are valid. Evaluation and `generate` use them too.
    docs/sampling.md."""
    max_thinking_tokens: PositiveInt | None = None
    """Tokens of a response, or of a turn, after which an open thought ends: `thinking_end` is added, without loss, and
    the policy goes on. Evaluation uses it too. docs/sampling.md."""
    thinking_end: str = ""
    """Text that ends a thought at max_thinking_tokens, with the closing tag in it. Empty: the tag alone."""
    include_stop_str_in_output: bool = True
    """Whether the response text for reward functions includes the `stop` text that ended it. vLLM's default: false."""
    max_staleness: NonNegativeInt = 0
    """Weight versions by which a step's responses may be behind the policy: generation runs ahead of training by this
    many steps. 0: they take turns. docs/async.md."""
    in_flight: Literal["keep", "resume", "wait"] = "keep"
    """With max_staleness above 0: during a weight sync in-flight responses pause (keep), are aborted and requested
    again (resume), or are waited for (wait). docs/async.md."""
    scheduling: Literal["fifo", "longest_first"] = "fifo"
    """Order in which the responses of a step begin: that of the prompts, or longest responses at the last visit first.
    docs/sampling.md."""
    straggler_seconds: Seconds | None = None
    """With max_staleness above 0: if a step waits and no group finishes for this many seconds, the responses being
    waited for are truncated, as at max_completion_length. Empty never truncates."""
    routing_replay: Literal["off", "engine", "trainer"] = "off"
    """For mixtures of experts: the trainer's passes use their own routers' choice (off), vLLM's (engine), or that of
    the pass for old log-probs (trainer). docs/moe.md."""
    mismatch_threshold: Annotated[float, Field(ge=1)] | None = None
    """Warn when a step's `token_mult_prob_error` is above this. Empty: warn when it is three times as far from 1 as in
    the first 5 steps and above the normal 1.01 in fp32 or 1.1 in bf16; never with max_staleness above 0."""
    kept: KeptSection = KeptSection()
    """Kept rollouts that replace generation."""
    servers: Count = 1
    """vLLM servers to start, each on `tp` x `pp` x `dp` devices. Colocated ones are spread evenly over `run.nodes`."""
    tp: PositiveInt = 1
    """Tensor-parallel size of each vLLM server."""
    pp: PositiveInt = 1
    """Pipeline-parallel size of each vLLM server: the number of stages that share its layers."""
    dp: PositiveInt = 1
    """Data-parallel size of each vLLM server: copies of its attention, which share its experts. Above 1 it needs
    enable_expert_parallel; models without experts use more `servers`."""
    nodes_per_server: PositiveInt = 1
    """Nodes that share each vLLM server, for servers with more GPUs than a node has. They run no ranks: placement is
    dedicated or external. Each node has an equal part of the `tp` x `pp` x `dp` devices. docs/servers.md."""
    quantization: Literal["none", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"] = "none"
    """Format in which vLLM computes linear layers: the weights' dtype, or FP8 with a scale per tensor, block of 128 x
    128 or output channel. docs/fp8.md."""
    enable_expert_parallel: bool = False
    """Distribute whole experts over the `tp` x `dp` workers of a vLLM server's stage, instead of sharding them."""
    placement: Placement = "auto"
    """Where the servers run. colocated: on the trainer's GPUs, on every node; they sleep during training. dedicated: on
    GPUs without ranks. external: the servers in `urls`. auto: external with `urls`, else colocated. On one node without
    GPUs colocated and dedicated are the same."""
    urls: list[str] = []
    """Addresses of running servers with the plug-in. Trainer and servers must reach each other. The run then starts no
    servers."""
    urls_file: str | None = None
    """File with one server address per line, read before each step and weight sync. While it exists it replaces `urls`:
    added servers get requests once they hold the current weights; removed servers get no more requests."""
    reconnect_timeout: Seconds = 120.0
    """Seconds to wait for a server when no server of `urls` responds; then the run ends."""
    token_file: str | None = None
    """File with the servers' access token, readable only by its owner. Empty: the file of MEGAGRPO_TOKEN_FILE, else
    MEGAGRPO_TOKEN. Without both, servers of `urls` get no token; launched servers get a new one for each run."""
    interface: str = LOOPBACK
    """The only network interface that launched servers listen on; lo is the loopback interface."""
    weight_sync_transport: TransportName = "auto"
    """Transport of weights: files in this host's memory, messages over NCCL or gloo (p2p), or mapped GPU memory
    (cuda_ipc). auto chooses by placement: docs/weight_sync.md. Your own: `path/file.py:Class` or `package.module:Class`
    (docs/transports.md)."""
    weight_sync_bucket_megabytes: PositiveFloat = 64.0
    """Largest message of the transport p2p, in MiB; a rank has two in flight per worker."""
    weight_sync_relay: bool = False
    """With the transport p2p: servers of the same layout pass weights on to each other. Saves time when the ranks'
    network bounds a weight sync. docs/weight_sync.md."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first launched server (the next ones follow); 0 picks free ones."""
    gpu_memory_utilization: Fraction = 0.4
    """Share of each GPU's memory that vLLM may take."""
    kv_cache_gb: PositiveFloat = 2.0
    """Memory of vLLM's KV cache on a machine without a GPU, in GiB."""
    max_num_seqs: PositiveInt = 256
    """Sequences that one server decodes at once."""
    enforce_eager: bool = False
    """Disable vLLM's CUDA graphs and compilation."""
    extra_args: list[str] = []
    """Additional arguments of vLLM's API server command. Unknown ones, and ones that other keys set, are rejected."""
    startup_timeout: Seconds = 600.0
    """Seconds within which a launched server must respond."""
    request_timeout: Seconds = 1800.0
    """Timeout of one generate request, in seconds."""
    weight_sync_timeout: Seconds = 300.0
    """Timeout of each phase of a weight sync, in seconds. A server started by the run or `megagrpo serve` is also
    restarted when its engine is silent for longer."""
    max_restarts: NonNegativeInt = 3
    """Restart limit of each launched server that dies or hangs. A restarted server gets the current weights before it
    gets requests. With 0, or at the limit, the run continues without that server."""

    @property
    def placed(self) -> str:
        """`placement` with auto resolved."""
        return self.placement if self.placement != "auto" else ("external" if self.urls else "colocated")

    @property
    def server_gpus(self) -> int:
        """The number of GPUs that generate."""
        return (len(self.urls) or self.servers) * self.devices_per_server

    @property
    def devices_per_server(self) -> int:
        """Devices of one vLLM server."""
        return self.tp * self.pp * self.dp

    @property
    def devices_per_node(self) -> int:
        """Devices of one vLLM server on each of its nodes."""
        return self.devices_per_server // self.nodes_per_server

    @property
    def server_text(self) -> str:
        """The sizes of a server as a product of keys, for messages."""
        others = [f" x rollout.{name} {size}" for name, size in (("pp", self.pp), ("dp", self.dp)) if size > 1]
        return f"rollout.tp {self.tp}{''.join(others)}"

    @property
    def processes_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return self.repetition_penalty != 1 or bool(
            self.logit_bias or self.allowed_token_ids or self.structured_outputs
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RowSampling(Section):
    """The sampling parameters that a row may have (`data.sampling_column`)."""

    temperature: Temperature = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    min_p: Share = 0.0
    max_tokens: PositiveInt = 1
    max_thinking_tokens: PositiveInt = 1
    stop: Annotated[Stop, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    seed: Annotated[int, Field(ge=0, le=2**62)] = 0  # room for the responses' numbers, which are added
    structured_outputs: StructuredOutputs = {}
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = {}
    allowed_token_ids: TokenIds = []
