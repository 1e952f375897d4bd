"""How responses are sampled, and the vLLM servers that do it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.placement import LOOPBACK, Placement, Transport
from megagrpo.config.section import Count, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Section, Temperature


class RolloutSection(Section):
    prompts_per_step: PositiveInt = 8
    """Prompts in each step."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt: the size of a group."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens, chat template included."""
    max_completion_length: PositiveInt = 256
    """Longest response in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer's log-probs are of the same distribution."""
    top_p: Fraction = 1.0
    """Sample from the most likely tokens that add up to this share; 1 from all. The trainer's log-probs are of what is left, by its own
    probabilities: so with top_k and min_p."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most likely tokens; 0 from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from the tokens that are at least this times as likely as the most likely one; 0 from all."""
    max_staleness: NonNegativeInt = 0
    """How many weight versions the responses that a step trains on may be behind the policy: generation runs ahead of training by so many
    steps. 0: generation and training take turns. docs/async.md."""
    in_flight: Literal["keep", "resume", "wait"] = "keep"
    """With max_staleness above 0, what becomes of responses under way when weights are synced. keep: they stand still and go on with the
    new weights. resume: they are broken off and asked for again from the tokens that they have. wait: the sync waits for their end."""
    straggler_seconds: Seconds | None = None
    """With max_staleness above 0: when a step waits and no group has been finished for so long, the responses that it waits for are cut,
    and end like those that reach max_completion_length. Empty never cuts."""
    mismatch_threshold: Annotated[float, Field(ge=1)] | None = None
    """Warn when a step's `token_mult_prob_error` is above this. Empty: warn on a jump, when the error is three times as far from 1 as in
    the run's first 5 steps and above what is normal, 1.01 in fp32 and 1.1 in bf16. With max_staleness above 0 empty never warns."""
    servers: Count = 1
    """vLLM servers to start, each with `tp` devices."""
    tp: PositiveInt = 1
    """Tensor-parallel size of each vLLM server."""
    quantization: Literal["none", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"] = "none"
    """Format in which vLLM computes its linear layers. none: the dtype of the weights. fp8_...: FP8, with one scale per tensor, per block
    of 128 x 128 or per output channel; every sync quantizes again. docs/weight_sync.md."""
    enable_expert_parallel: bool = False
    """Share out whole experts over the `tp` workers of each vLLM server, instead of a part of every expert to each."""
    placement: Placement = "auto"
    """Where the servers run. colocated: started here, on the trainer's GPUs; they sleep while it trains. dedicated: started here, on GPUs
    that no rank uses. external: those of `urls`. auto is external with `urls`, else colocated. Without GPUs the first two are the same."""
    urls: list[str] = []
    """Servers that somebody else started, with the same plug-in, on any host that is reached from here and back; none is launched when
    given."""
    urls_file: str | None = None
    """File that is read before each step and each sync. While it exists, the servers are those that it names, one address a line: ones
    that it adds are asked once they hold the current weights, others are asked no more."""
    reconnect_timeout: Seconds = 120.0
    """Seconds that the run waits for one of the servers of `urls` when none of them answers; then it ends."""
    token_file: str | None = None
    """File with the token that servers ask for, which only its owner may open. Empty: the file that MEGAGRPO_TOKEN_FILE names, or else the
    token in MEGAGRPO_TOKEN; without both, servers of `urls` are sent none, and launched ones get one that is made for the run."""
    interface: str = LOOPBACK
    """Network interface that launched servers listen on, and no other; lo is this host's own."""
    weight_sync_transport: Transport = "auto"
    """How weights travel. shared_memory: files of this host. p2p: from rank to worker, over NCCL or, without GPUs, gloo. cuda_ipc: servers
    map the trainer's GPU memory. auto: cuda_ipc for colocated servers on GPUs, shared_memory on one host without GPUs, else p2p."""
    weight_sync_bucket_megabytes: PositiveFloat = 64.0
    """Bound on one message of the transport p2p, in MiB; a rank has two for each worker under way."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first launched server (the next ones follow); 0 picks free ones."""
    gpu_memory_utilization: Fraction = 0.4
    """Share of each GPU's memory that vLLM may take."""
    kv_cache_gb: PositiveFloat = 2.0
    """Memory of vLLM's KV cache on a machine without a GPU, in GiB."""
    max_num_seqs: PositiveInt = 256
    """Sequences that one server decodes at once."""
    enforce_eager: bool = False
    """Turn CUDA graphs and compilation of vLLM off."""
    extra_args: list[str] = []
    """More arguments for the vLLM API server, as on its command line. Unknown ones, and those that other keys set, are refused."""
    startup_timeout: Seconds = 600.0
    """Seconds until a launched server must answer."""
    request_timeout: Seconds = 1800.0
    """Seconds until one generate request must be answered."""
    weight_sync_timeout: Seconds = 300.0
    """Seconds that each phase of a weight sync may take; one that takes longer ends the run with the phase, the rank and the tensor. After
    as long without a word from its engine a server that this run or `megagrpo serve` has started is started again."""
    max_restarts: NonNegativeInt = 3
    """How many times each launched server that dies or hangs is started again. It holds the current weights before it is asked. With 0,
    or after the last time, the others go on without it."""

    @property
    def placed(self) -> str:
        """`placement` with auto resolved."""
        return self.placement if self.placement != "auto" else ("external" if self.urls else "colocated")

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
