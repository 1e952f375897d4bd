"""The trainer treats every key of config.json that changes transformers' results as transformers does, or refuses it.

The keys come from the family's configuration class, and from every other attribute that transformers reads on the way
to logits. Each gets other values, is removed, and is set to null, on a tiny model with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from ranks import run_ranks
from tiny_families import MODELS, family_of, tiny_config
from transformers.initialization import no_init_weights

from megagrpo.config import ParallelSection
from megagrpo.families.config_keys import HARMLESS, architecture_problems
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.bridge.load import load_hf

TOKENS = 40  # more than the attention windows and the start lengths of rotary scaling
ABSENT = object()
# The first case of each family, without rotary scaling where the family allows it; the other cases belong to the full
# suite.
FIRST = {family_of(name).model_type: name for name in reversed(MODELS)}
# Families that share no attention, norm or routing with each other; the others belong to the full suite.
DEFAULT = {"llama"}
WORDS = {
    "hidden_act": ["gelu"],
    "hidden_activation": ["gelu", "silu"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
}
WORDS |= {"scoring_func": ["softmax", "sigmoid"], "rope_type": ["default", "linear", "dynamic"]}
ROTARY = ("factor", "partial_rotary_factor", "attention_factor", "mrope_section", "mscale", "mscale_all_dim")


def raw_config(name: str) -> dict[str, Any]:
    """config.json of the case `name` as transformers writes it."""
    return json.loads(json.dumps(tiny_config(*MODELS[name]).to_dict()))


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Values near `value`, most revealing first; then ABSENT, and null."""
    if key in WORDS:
        yield from WORDS[key]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value + 1, 0)
        if key not in ("intermediate_size", "linear_key_head_dim"):  # a norm of one number magnifies the last bits
            yield 1
    elif isinstance(value, float):
        yield from (1.5 * value + 0.25, 1.0, 0.0)
    elif isinstance(value, list):
        yield from (value[::-1], value[1:])
        if key == "layer_types":
            yield from ([kind] * len(value) for kind in ("full_attention", "sliding_attention"))
    elif isinstance(value, dict):
        for inner in dict.fromkeys([*sorted(value, key=lambda name: name != "rope_theta"), *ROTARY]):
            for other in other_values(inner, value.get(inner)):
                yield changed(value, inner, other)
    elif value is None:
        yield from (True, 1, 3, 0.5, [0, 1], ["full_attention", "sliding_attention"] * 2)
    yield from (ABSENT, None)


def changed(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`raw` with another value of `key`, or without it."""
    return {k: v for k, v in raw.items() if k != key} | ({} if value is ABSENT else {key: value})


def their_model(raw: dict[str, Any]) -> torch.nn.Module:
    """transformers' model with weights that depend only on their names and shapes."""
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    with no_init_weights():
        # only eager attention caps scores
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    model.tie_weights()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                generator = torch.Generator().manual_seed(crc32(key.encode()))
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator) + (tensor.dim() == 1))
    return model


@torch.no_grad()
def their_logits(model: torch.nn.Module) -> torch.Tensor:
    return model(tokens()[None]).logits[0]


@torch.no_grad()
def our_logits(folder: Path, layout) -> torch.Tensor:
    hf_config = load_hf_config(folder)
    (chunk,) = build_model(
        hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False, longest_sequence=TOKENS)
    )
    load_hf([chunk], hf_config, folder, layout)
    packed = pack_params(torch.tensor([0, TOKENS]).int())
    return chunk(tokens()[None], torch.arange(TOKENS)[None], None, packed_seq_params=packed)[
        0, :, : hf_config.vocab_size
    ]


def tokens() -> torch.Tensor:
    return torch.randint(0, 60, (TOKENS,), generator=torch.Generator().manual_seed(1))


def keys_read(raw: dict[str, Any]) -> set[str]:
    """Keys that transformers reads from a configuration on the way to logits, including keys that it does not have."""
    read, kind = set(), type(transformers.AutoConfig.for_model(raw["model_type"]))
    plain = kind.__getattribute__

    def record(self, key):
        read.add(key)
        return plain(self, key)

    kind.__getattribute__ = record
    try:
        their_logits(their_model(raw))
    finally:
        del kind.__getattribute__
    return {key for key in read if not key.startswith("_") and not hasattr(transformers.PretrainedConfig, key)}


def wrongly_loaded(name: str, folder: Path, all_values: bool) -> tuple[list[str], set[str]]:
    """Changes that load and give other logits than transformers, and the keys that change transformers' logits.

    Without `all_values`, skips keys known as harmless, and tries only the first value that loads and the missing
    key."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    layout, raw = init_layout(ParallelSection()), raw_config(name)
    base = their_logits(their_model(raw))
    wrong, telling = [], set()
    for key in sorted(
        {*raw, *keys_read(raw)} - {"model_type", "transformers_version"} - (set() if all_values else HARMLESS)
    ):
        tried = [(value, changed(raw, key, value)) for value in other_values(key, raw.get(key))]
        loads = [(value, config) for value, config in tried if not architecture_problems(config)]
        for value, config in (
            loads if all_values else [trial for trial in loads if trial is loads[0] or trial[0] is ABSENT]
        ):
            try:
                model = their_model(config)
                expected = their_logits(model)
            except Exception:  # transformers refuses it as well
                continue
            if not expected.isfinite().all():
                continue
            if expected.shape != base.shape or not torch.allclose(expected, base, atol=1e-5):
                telling.add(key)
            if problem := _difference(model, expected, config, folder, layout):
                wrong.append(f"{key}={'(absent)' if value is ABSENT else value}: {problem}")
    layout.close()
    return wrong, telling


def _difference(
    model: torch.nn.Module, expected: torch.Tensor, config: dict[str, Any], folder: Path, layout
) -> str | None:
    """The difference between the trainer's logits and transformers'; None when they agree, or when loading is
    refused."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        ours = our_logits(folder, layout)
    except Exception as error:
        refused = isinstance(error, ValueError) and str(error).startswith("model")
        return None if refused else f"{type(error).__name__} {error}"
    off, limit = (ours - expected).abs().max().item(), 1e-4 * max(1, expected.abs().max().item())
    if off > limit:  # norms of nearly nothing magnify float32's last bits, transformers' own too
        model.config._experts_implementation = "eager"  # the only one in float64
        exact = their_logits(model.double())
        off, limit = (ours - exact).abs().max().item(), max(limit, (expected - exact).abs().max().item())
    return None if off <= limit else f"logits off by {off:.3g}, of which float32 explains {limit:.3g}"


@pytest.fixture(scope="module")
def imported():
    """transformers imports on first use: once here, not in every fork."""
    for kind, _ in MODELS.values():
        getattr(transformers, f"{kind}ForCausalLM")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (kind not in DEFAULT)) for kind, name in FIRST.items()]
)
def test_a_key_that_changes_transformers_logits_changes_ours_alike_or_is_refused(name, tmp_path, imported):
    ((wrong, telling),) = run_ranks(wrongly_loaded, 1, name, tmp_path, False)
    fixed = {"hidden_size"} if name.startswith("lfm2") else set()  # by conv_dim, so other values are refused
    assert {"hidden_size", "rope_parameters"} - fixed <= telling
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_so_does_every_value_of_every_key_harmless_ones_included(name, tmp_path, imported):
    ((wrong, telling),) = run_ranks(wrongly_loaded, 1, name, tmp_path, True, timeout=600)
    assert not wrong, "\n".join(wrong)
    assert not telling & HARMLESS


def test_every_family_is_tried():
    assert FIRST.keys() == FAMILIES.keys() and DEFAULT < FAMILIES.keys()
