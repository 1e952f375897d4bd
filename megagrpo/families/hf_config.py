"""Reads a model's `config.json` into an `HfConfig`, and checks the rules that a parallel layout must satisfy for it.

Imports no torch, so `plan.py` can check a run on a login node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megagrpo.config import ParallelSection, Problem, ProblemError
from megagrpo.families.config_keys import architecture_problems, text_config, wrapper_of
from megagrpo.families.family_index import FAMILIES, family_of
from megagrpo.families.shared.architecture import Experts, HfConfig
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import Table, common_config, rope
from megagrpo.families.shared.stored_names import stored_names
from megagrpo.families.shared.vision import TOWER
from megagrpo.families.shared.wrapper import Naming
from megagrpo.regular_files import read_regular

MODEL_KEYS = ("model",)  # keys of a problem with the model's folder
_LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
# Megatron's linears outside of experts, in the order of the forward pass
_LINEARS = (
    *(f"self_attention.linear_{name}" for name in ("qkv", "qk", "q", *_LATENT, "proj")),
    *("self_attention.in_proj", "self_attention.out_proj", "mixer.in_proj", "mixer.out_proj"),
    *("self_attention.mixer.in_proj", "self_attention.mixer.out_proj"),
    *(f"{mlp}.linear_{name}" for mlp in ("mlp", "mlp.shared_experts") for name in ("fc1", "fc2")),
)


OF_SCORES = ("architectures", "num_labels", "id2label", "label2id", "problem_type")  # keys that a reward model changes


def load_hf_config(folder: str | Path, scores: bool = False) -> HfConfig:
    """Parse `folder/config.json`; with `scores` that of a reward model too. Raises ValueError when it is missing,
    broken, or of an unsupported model."""
    raw = read_raw_config(folder)
    if scores and "ForSequenceClassification" in str(raw.get("architectures")):
        raw = {key: value for key, value in raw.items() if key not in OF_SCORES}
    return parse_hf_config(raw, stored_names(Path(folder)) if wrapper_of(raw) else ())


def read_raw_config(folder: str | Path) -> dict[str, Any]:
    """Read `folder/config.json` as a dict. Raises ValueError when it is missing or broken."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(read_regular(path).decode(), object_hook=_with_floats)
    except FileNotFoundError:
        said = f"{folder} holds no config.json; name a folder in Hugging Face format"
    except OSError as e:
        said = f"{path} cannot be read: {e.strerror}; name a folder in Hugging Face format"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        said = f"{path} is not valid JSON: {e}; download it again"
    else:
        if isinstance(raw, dict):
            return raw
        said = f"{path} must contain a JSON object; download it again"
    raise ProblemError(Problem(MODEL_KEYS, said))


def _with_floats(value: dict[str, Any]) -> Any:
    """Return the number of transformers' {"__float__": "Infinity"}, and any other object as it is."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def parse_hf_config(raw: dict[str, Any], names: Collection[str] = ()) -> HfConfig:
    """Return the architecture of a config.json; of a multimodal model's text model. `names` are the tensors in its
    files, if known. Raises ValueError, listing every reason, when it is not supported."""
    if lines := architecture_problems(raw):
        raise ProblemError(*_of_model(lines))
    text = text_config(raw)
    family = family_of(text["model_type"])
    assert family is not None, "architecture_problems has refused it"
    hf_config = family.read(text, common_config(family, text))
    if found := wrapper_of(raw):
        wrapper = found[1]
        hf_config = replace(hf_config, wrapper=wrapper, file_names=wrapper.naming(names), module_names=wrapper.modules)
        if wrapper.vision and (vision := wrapper.vision(raw)):
            hf_config = replace(hf_config, vision=vision.in_files(names))
    return replace(hf_config, linears=_linears(hf_config))


def table_of(hf_config: HfConfig) -> Table:
    """Return the family's table with the names of the model's files, and the tensors of a trained tower."""
    table, naming = FAMILIES[hf_config.family].table(hf_config), hf_config.file_names
    table = table if naming == Naming() else {key: rule.renamed(naming.of) for key, rule in table.items()}
    if (vision := hf_config.vision) is None:
        return table
    return table | {f"{TOWER}.{name}": same(vision.file_name(name)) for name in vision.trained}


def untrained(hf_config: HfConfig) -> Callable[[str], bool]:
    """Return whether the tensor of a name, one that no rule of the table names, stays as loaded."""
    of_wrapper = hf_config.wrapper.patterns if hf_config.wrapper else ()
    # an empty alternative matches no name of a tensor
    text, whole = ("|".join(names) for names in (FAMILIES[hf_config.family].untrained(hf_config), of_wrapper))
    return lambda name: bool(re.fullmatch(text, hf_config.file_names.alone(name)) or re.fullmatch(whole, name))


def _linears(hf_config: HfConfig) -> dict[str, tuple[str, ...]]:
    table = FAMILIES[hf_config.family].table(hf_config)
    rules = {linear: table[f"{linear}.weight"] for linear in _LINEARS if f"{linear}.weight" in table}
    module_of = hf_config.module_names.of
    return {linear: tuple(module_of(name).removesuffix(".weight") for name in rules[linear].names) for linear in rules}


def _of_model(lines: Sequence[str]) -> list[Problem]:
    """Return texts about config.json as problems of the model's folder."""
    return [Problem(MODEL_KEYS, line) for line in lines]


def _unsupported(config: HfConfig) -> list[str]:
    """Return what Megatron cannot compute of a model whose config.json is valid."""
    problems = []
    if config.rotary_dim % 2 or not config.rotary_dim:
        problems.append(
            f"{config.rotary_dim} dimensions of each head are rotated; the number must be even and positive"
        )
    if config.experts is not None and config.experts.normalized and config.experts.per_token == 1:
        said = "num_experts_per_tok=1 with normalized expert weights is not supported"
        problems.append(f"{said}: the only weight would always be 1")
    return problems


def model_problems(hf_config: HfConfig, parallel: ParallelSection) -> list[Problem]:
    """Return why Megatron cannot train this model in `parallel`, with the valid values; empty when it can."""
    tp, problems = parallel.tp, _of_model(_unsupported(hf_config))
    sizes = {"num_attention_heads": hf_config.num_heads, "num_key_value_heads": hf_config.num_kv_heads}
    if hf_config.has_dense_mlps:
        sizes["intermediate_size"] = hf_config.intermediate_size
    widths = {"num_key_value_heads": hf_config.head_dim}  # of the KV heads that several ranks may share
    if own := hf_config.global_heads:
        sizes["num_global_key_value_heads"] = own.num_kv_heads
        widths |= {} if own.keys_as_values else {"num_global_key_value_heads": own.head_dim}
    if hf_config.experts and hf_config.experts.shared_size:
        sizes["moe_intermediate_size x n_shared_experts"] = hf_config.experts.shared_size

    def fits(key: str, size: int, tp: int) -> bool:
        if key not in widths or hf_config.mla or size % tp == 0:
            return size % tp == 0
        if hf_config.wide_qk_norm:  # ranks that share a KV head would each hold a copy of its norm
            return False
        # ranks share the rows of a KV head's group, so the rows must be divisible too
        return tp % size == 0 and 2 * size * widths[key] % tp == 0

    for key, size in sizes.items():
        if not fits(key, size, tp):
            valid = [d for d in _divisors(hf_config.num_heads) if all(fits(*item, d) for item in sizes.items())]
            said = f"{key}={size} is not divisible by tp={tp}; valid tp: {_words(valid)}"
            problems.append(Problem(("parallel.tp", "model.path"), said))
    problems += _recurrent_problems(hf_config, parallel)
    problems += _stage_problems(hf_config.num_layers, parallel)
    problems += _one_stage_problems(hf_config, parallel)
    problems += _expert_problems(hf_config.family, hf_config.experts, parallel)
    return problems


def _recurrent_problems(hf_config: HfConfig, parallel: ParallelSection) -> Iterator[Problem]:
    recurrence, tp, cp = hf_config.recurrence, parallel.tp, parallel.cp
    if recurrence is not None and (reason := recurrence.why_not(tp, cp)):
        yield Problem(("parallel.tp", "parallel.cp", "model.path"), f"{reason}; lower one")


def _stage_problems(layers: int, parallel: ParallelSection) -> Iterator[Problem]:
    stages = parallel.pp * parallel.vpp
    example, own = f"parallel.pipeline_layers=[{_words(nearly_even(layers, stages), ',')}]", parallel.pipeline_layers
    if own is not None and sum(own) != layers:
        fix = f"; for example {example}" if stages <= layers else ""
        said = f"{own} sums to {sum(own)}, not to num_hidden_layers={layers}{fix}"
        yield Problem(("parallel.pipeline_layers", "model.path"), said)
    if own is None and layers % stages:
        fix = f"; or set {example}" if stages <= layers else ""
        said = f"num_hidden_layers={layers} is not divisible by pp x vpp = {stages}; valid pp x vpp: "
        yield Problem(("parallel.pp", "parallel.vpp", "model.path"), f"{said}{_words(_divisors(layers))}{fix}")


def _one_stage_problems(hf_config: HfConfig, parallel: ParallelSection) -> Iterator[Problem]:
    """Yield parts of the model that pipeline stages cannot share."""
    pp = (("parallel.pp", "model.path"), f"{parallel.pp}, but", "set it to 1")
    if hf_config.layer_inputs and parallel.pp > 1:
        why = "the inputs per layer come from the embeddings of tokens, which only the first stage has"
        yield Problem(pp[0], f"{pp[1]} {why}; {pp[2]}")
    elif hf_config.borrowers and parallel.pp > 1:
        first = hf_config.num_layers - hf_config.borrowers
        why = f"decoder blocks from {first} on use keys and values of blocks before, which another stage may have"
        yield Problem(pp[0], f"{pp[1]} {why}; {pp[2]}")
    if hf_config.vision and hf_config.vision.trained:
        yield from trained_tower_problems(hf_config, parallel)


def trained_tower_problems(hf_config: HfConfig, parallel: ParallelSection) -> Iterator[Problem]:
    """Yield the problem of a tower that several pipeline stages would train."""
    vision, own = hf_config.vision, parallel.pipeline_layers
    first = own[0] if own else hf_config.num_layers // (parallel.pp * parallel.vpp)
    if vision and vision.levels > first:
        said = f"the first stage has {first} decoder blocks, but a trained tower adds features to {vision.levels}"
        fix = "put as many there with parallel.pipeline_layers, or freeze the tower"
        keys = ("model.freeze_vision_tower", "parallel.pp", "parallel.pipeline_layers")
        yield Problem(keys, f"false: {said}; {fix}")


def stage_layers(layers: int, parallel: ParallelSection) -> list[int]:
    """Return the number of decoder layers of each pipeline stage, virtual ones included, in model order."""
    stages = parallel.pp * parallel.vpp
    if parallel.pipeline_layers is None:
        return [layers // stages] * stages
    assert len(parallel.pipeline_layers) == stages, f"{list(parallel.pipeline_layers)} for {stages} stages"
    return list(parallel.pipeline_layers)


def nearly_even(layers: int, stages: int) -> list[int]:
    """Return `stages` numbers that sum to `layers`. The remainder goes to middle stages first, because the first embeds
    and the last has the LM head."""
    favoured = [*range(1, stages - 1), 0][: layers % stages]
    return [layers // stages + (stage in favoured) for stage in range(stages)]


def _expert_problems(family: str, experts: Experts | None, parallel: ParallelSection) -> Iterator[Problem]:
    ep, etp, none = parallel.ep, parallel.expert_tp, f"but {family} has no experts"
    if experts is None:
        if ep > 1:
            yield Problem(("parallel.ep", "model.path"), f"{ep}, {none}; set it to 1")
        if etp != parallel.tp:
            yield Problem(("parallel.etp", "model.path"), f"{etp}, {none}; leave it empty")
        return
    if (count := experts.count) % ep:
        said = f"the model's {count} experts are not divisible by ep={ep}; valid ep: {_words(_divisors(count))}"
        yield Problem(("parallel.ep", "model.path"), said)
    if (width := experts.intermediate_size) % etp:
        said = f"the experts' width {width} is not divisible by etp={etp}; valid etp: {_words(_divisors(width))}"
        yield Problem(("parallel.etp", "model.path"), said)


def architecture_differences(one: HfConfig, other: HfConfig) -> dict[str, str]:
    """Return what makes two models different functions of their weights: key -> `value of one, value of other`.

    Training length and dtype on disk may differ, and one of them may lack the tower.
    """
    free = {"max_positions", "dtype", *(["vision"] if None in (one.vision, other.vision) else [])}
    names = [f.name for f in fields(HfConfig) if f.compare and f.name not in free]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    ropes = [rope(config.raw) for config in (one, other)]
    for key in sorted({*ropes[0], *ropes[1]} - {"type", *names}):
        pairs[key] = (ropes[0].get(key), ropes[1].get(key))
    return {name: f"{value}, {different}" for name, (value, different) in pairs.items() if value != different}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _words(values: list[int], separator: str = ", ") -> str:
    return separator.join(map(str, values))
