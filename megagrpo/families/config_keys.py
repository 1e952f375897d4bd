"""Checks config.json: the family, the types of values, and the keys. A family reads some keys, others change nothing,
and every other key is rejected by name. Imports no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from megagrpo.families.family_index import FAMILIES, family_of
from megagrpo.families.shared.family import COMMON, ROTARY, SLIDING, Family, Raw, rope_problems, unknown_rope_keys
from megagrpo.families.shared.precisions import precision_problems
from megagrpo.families.shared.wrapper import MULTIMODAL, OUTER, TEXT_CONFIG, Wrapper, thinker_of

# Keys that change no logit of a text model, whatever their value.
HARMLESS = frozenset(
    # Written by the program that made the file, about itself or the file.
    "_name_or_path _model_name_or_path _commit_hash _attn_implementation_autoset _pre_quantization_dtype "
    "transformers_version transformers.js_config model_name unsloth_version unsloth_fixed unsloth_tiled_mlp "
    "is_llama_config is_decoder tie_encoder_decoder "
    # Token ids and tokenizers: the tokenizer's files decide. Padding rows differ in initial values alone.
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens "
    "bad_words_ids prefix tokenizer_class "
    # Generation: the run's config sets the sampling.
    "do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "exponential_decay_length_penalty max_length min_length max_new_tokens remove_invalid_values use_cache "
    "cache_implementation return_dict_in_generate output_scores "
    # Outputs of transformers besides logits, and losses that it adds.
    "output_hidden_states output_attentions output_router_logits return_dict use_return_dict router_aux_loss_coef "
    "router_z_loss_coef aux_loss_alpha seq_aux "
    # Classification heads, which a language model lacks.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout "
    # How the same result is computed: kernels, precision, chunks, ranks, recomputation, compilation.
    "_attn_implementation attn_implementation _experts_implementation _flash_attn_2_enabled use_flash_attn "
    "use_flash_attention_2 torchscript tf_legacy_loss use_bfloat16 pretraining_tp ep_size chunk_size_feed_forward "
    "gradient_checkpointing use_reentrant_checkpointing neftune_noise_alpha "
    # Other names for the length that vLLM and transformers only use as a limit.
    "max_sequence_length max_seq_len seq_length model_max_length "
    # Sum of the dimensions of latent attention's queries, computed by transformers and written back.
    "qk_head_dim".split()
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "q_lora_rank", "sliding_window")
# Type of values in config.json -> the keys with this type or null, and the type's name.
_TYPES: dict[type | tuple[type, ...], tuple[tuple[str, ...], str]] = {
    dict: (("rope_scaling", "rope_parameters"), "an object of keys and values"),
    bool: (("tie_word_embeddings", "use_expert_bias"), "true or false"),
    list: (("layer_types", "mlp_only_layers", "no_rope_layers"), "a list"),
    (int, float): (
        (
            *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "initializer_range"),
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
            *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "routed_scaling_factor"),
            *("layer_norm_eps", "norm_eps", "logit_scale"),
        ),
        "a number",
    ),
    int: (
        (
            *("max_position_embeddings", "original_max_position_embeddings", "max_window_layers"),
            *("sliding_window_pattern", "num_experts", "num_local_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "decoder_sparse_step"),
            *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
        ),
        "a whole number",
    ),
}
# model_type -> the part of the model that no code here computes, or why nothing can serve it
_MAMBA1 = "its recurrent layers are Mamba-1, whose decays differ per channel and state; only Mamba-2 is implemented"
_PHI4 = (
    "vLLM no longer has a class for it but the release's own code, which is never run; its text model is a Phi-4-mini"
)
_BEYOND = {"jamba": _MAMBA1, "falcon_mamba": _MAMBA1, "phi4_multimodal": _PHI4, "phi4mm": _PHI4}
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
_OF_ANY = ("model_type", "architectures", "auto_map", "initializer_range")  # beside `OUTER`, of a multimodal model
_WITHOUT_REFERENCE = ("bailing_moe", "bailing_moe_v2")  # Ling and Ring
# model_type without a family -> its parts for which there is no code in `policy`
_NEW_PARTS = dict.fromkeys(("gemma3n", "gemma3n_text"), "AltUp, Laurel and activations of the largest values only")
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def architecture_problems(raw: Raw) -> list[str]:
    """Return why this config.json cannot be trained, one line each; empty when it can."""
    if not isinstance(kind := raw.get("model_type"), str | None):
        return [f"model_type is {kind!r} in config.json; it must be a name"]
    if found := wrapper_of(raw):
        return _wrapper_problems(*found, raw)
    family = family_of(kind)
    if family is None:
        return [_unknown(raw)]
    if odd := _wrong_types(family, raw):
        return odd
    missing = [f"config.json lacks {key}" for key in family.required if key not in raw]
    wrong = missing + _class_problems(family, raw) + _layer_type_problems(family, raw)
    kinds = _rope_types(raw)
    wrong += rope_problems(family, raw, kinds)
    unknown_parameters = unknown_rope_keys(family, raw)
    wrong += _key_problems(family, raw, unknown_parameters) + precision_problems(raw)
    return wrong + family.problems(raw)


def wrapper_of(raw: Raw) -> tuple[Family, Wrapper] | None:
    """Return the text model's family and the multimodal model of this config.json; None for any other model."""
    text = thinker_of(raw).get(TEXT_CONFIG)
    kind = text.get("model_type") if isinstance(text, dict) else None
    for family in FAMILIES.values():
        for wrapper in family.wrappers:
            if raw.get("model_type") == wrapper.model_type and kind in (None, *(wrapper.texts or [family.model_type])):
                return family, wrapper
    return None


def text_config(raw: Raw) -> Raw:
    """Return config.json of a multimodal model's text model alone, and `raw` itself for any other model."""
    if (found := wrapper_of(raw)) is None:
        return raw
    family, wrapper = found
    return wrapper.text_of(thinker_of(raw)) | dict(model_type=family.model_type, architectures=[family.architecture])


def _wrapper_problems(family: Family, wrapper: Wrapper, raw: Raw) -> list[str]:
    """Return why this multimodal model's text model cannot be trained."""
    raw = thinker_of(raw)
    if not isinstance(raw.get(TEXT_CONFIG, {}), dict):
        return [f"{TEXT_CONFIG} is {raw[TEXT_CONFIG]!r} in config.json; it must be an object of keys and values"]
    problems = _class_problems(wrapper, raw)
    if TEXT_CONFIG in raw:
        known = HARMLESS.union(MULTIMODAL, OUTER, wrapper.ignored, _OF_ANY)
        problems += _unknown_keys(wrapper, {key: value for key, value in raw.items() if key not in known})
    for key in wrapper.conflicts(raw):
        said = f"config.json has {key}={raw[key]}, but {TEXT_CONFIG} has {not raw[key]}"
        problems.append(f"{said}, and vLLM and transformers read different ones; set both to what fits the weights")
    where, text = f"{TEXT_CONFIG} of config.json" if TEXT_CONFIG in raw else "config.json", text_config(raw)
    missing = [f"config.json lacks {key}" for key in wrapper.missing(text)]
    of_text = missing + architecture_problems(text) or wrapper.problems(raw)  # the latter reads checked sizes
    return problems + [line.replace("config.json", where, 1) for line in of_text]


def _wrong_types(family: Family, raw: Raw) -> list[str]:
    """Return values of the wrong type: sizes, numbers, lists, objects, a dtype that torch lacks, names of rotations."""
    odd = _odd_sizes(family, raw)
    for kind, (keys, what) in _TYPES.items():
        values = {
            key: raw[key] for key in keys if raw.get(key) is not None and key in (*COMMON, *family.keys, "layer_types")
        }
        odd += [
            f"{key} is {value!r} in config.json; it must be {what}"
            for key, value in values.items()
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ]
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype not in (None, *_DTYPES):
        odd.append(f"dtype is {dtype!r} in config.json; it must be one of {', '.join(_DTYPES)}")
    if not odd:  # the sections with rotations are objects
        names = [kind for kind in _rope_types(raw) if not isinstance(kind, str)]
        odd += [f"rope_type is {name!r} in config.json; it must be a name" for name in names[:1]]
    return odd


def _odd_sizes(family: Family, raw: Raw) -> list[str]:
    typed = {key for keys, _ in _TYPES.values() for key in keys}
    required = [key for key in family.required if key in raw and key not in typed]
    sizes = {key: raw[key] for key in required if (key, raw[key]) != ("q_lora_rank", None)}
    sizes |= {key: raw[key] for key in _OPTIONAL_SIZES if raw.get(key) is not None and key not in family.ignored}
    return [
        f"{key} is {size!r} in config.json; it must be a positive whole number"
        for key, size in sizes.items()
        if type(size) is not int or size < 1
    ]


def _rope_types(raw: Raw) -> list[Any]:
    """Return every kind of rotary scaling in config.json, even if another key overrides it here: vLLM may read it."""
    tables = [raw.get(key) or {} for key in ROTARY]
    tables += [value for table in tables for value in table.values() if isinstance(value, dict)]
    return [
        table[name] for table in tables for name in ("rope_type", "type") if table.get(name) not in (None, "default")
    ]


def _unknown(raw: Raw) -> str:
    """Return the error for a model_type without a family. It suggests one only if the classes are the same."""
    kind, classes = raw.get("model_type"), raw.get("architectures") or []
    classes = list(map(str, classes)) if isinstance(classes, list) else [str(classes)]
    if isinstance(text := raw.get(TEXT_CONFIG), dict):
        return _unknown_wrapper(str(kind), str(text.get("model_type") or "without model_type"))
    if reason := _BEYOND.get(str(kind)):
        return f"architecture {kind} is not supported: {reason}. {_supported(str(kind))}"
    if same := [name for name, family in FAMILIES.items() if family.architecture in classes]:
        return (
            f"architecture {FAMILIES[same[0]].architecture} is not supported as model_type {kind}, but as "
            f"{same[0]}; set model_type to {same[0]} in a copy of config.json. Then all other keys are checked"
        )
    if kind in _WITHOUT_REFERENCE:
        said = f"architecture {kind} is not supported: transformers has no class for it, only the release's own code"
        return f"{said}, so there is no reference to compare a family's logits with: docs/add_a_model.md"
    return (
        f"architecture {kind or ', '.join(classes)} is not supported: no file in megagrpo/families "
        f"describes it, and another family would compute other numbers. {_supported(str(kind))}"
    )


def _supported(name: str) -> str:
    """Return how to add a family, and the names of the supported ones that are most like `name`."""
    near = get_close_matches(name.removesuffix("_text"), FAMILIES, n=3) or ["llama", "qwen3"]
    others = f"{', '.join(near)} and {len(FAMILIES) - len(near)} more"
    needs = f"It needs {_NEW_PARTS[name]}, which megagrpo/policy does not compute. " if name in _NEW_PARTS else ""
    return f"{needs}docs/add_a_model.md shows how to write that file. Supported (docs/models.md): {others}"


def _unknown_wrapper(kind: str, inside: str) -> str:
    """Return the error for a multimodal model with the text model `inside`, of which no family has a `Wrapper`."""
    pairs = {(wrapper.model_type, name) for name, family in FAMILIES.items() for wrapper in family.wrappers}
    if texts := sorted(name for wrapper, name in pairs if wrapper == kind):
        return f"{kind} is supported with the text model {' or '.join(texts)}, not with {inside}: docs/add_a_model.md"
    if family_of(inside):
        said = f"the text model {inside} is supported, but no `Wrapper` in megagrpo/families describes {kind}"
        return f"{kind} is multimodal: {said}, the model around it. docs/add_a_model.md shows how to add one"
    said = f"no file in megagrpo/families describes its text model {inside}. {_supported(inside)}"
    return f"{kind} is multimodal, and {said}; multimodal: {', '.join(sorted({k for k, _ in pairs}))}"


def _key_problems(family: Family, raw: Raw, unknown_parameters: dict[str, Any]) -> list[str]:
    """Return keys of config.json with a value that this family's code does not implement, one line each.

    A key passes if the family reads it, it changes nothing, its value is implemented, or it is unknown and null.
    """
    fixed = family.fixed_values
    # Null means off, so it passes only where off is the implemented value: transformers reads is_causal=null as false.
    wrong = [
        f"{_has(family, key, raw[key])}; {fix}"
        for key, (value, fix) in fixed.items()
        if key in raw and raw[key] != value and not (raw[key] is None and not value)
    ]
    known = HARMLESS.union(COMMON, family.keys, family.ignored, fixed, ["layer_types"])  # layer_types is checked apart
    unknown = {key: value for key, value in raw.items() if key not in known} | unknown_parameters
    return wrong + _unknown_keys(family, unknown)


def _unknown_keys(family: Family | Wrapper, unknown: dict[str, Any]) -> list[str]:
    return [
        f"{_has(family, key, value)}, a key that the trainer does not know and that may change what the model "
        "computes. If the model's own code does not read it, remove it from a copy of config.json; else this model is "
        "not supported: docs/add_a_model.md"
        for key, value in unknown.items()
        if value is not None
    ]


def _has(family: Family | Wrapper, key: str, value: Any) -> str:
    text = repr(value)
    return f"config.json ({family.model_type}) has {key}={text if len(text) <= 60 else text[:57] + '...'}"


def _class_problems(family: Family | Wrapper, raw: Raw) -> list[str]:
    """Return why the class is not the family's, by `architectures`, which vLLM reads, or `auto_map` (remote code)."""
    problems, name = [], family.architecture
    names = {name, *family.classes}
    classes, remote = raw.get("architectures"), raw.get("auto_map")
    if classes and not names & {*(classes if isinstance(classes, list) else [classes])}:
        problems.append(
            f"config.json has architectures={classes} with model_type={raw['model_type']}, whose class is "
            f"{name}. If that class fits the model, set architectures to [{name!r}] in a copy of config.json; else it "
            "is not supported: docs/add_a_model.md"
        )
    if isinstance(remote, dict):
        remote = next((remote[name] for name in _AUTO_CLASSES if name in remote), None)
    if remote and str(remote).rpartition(".")[2] != name:
        problems.append(
            f"config.json has auto_map with {remote}, custom code; the trainer and vLLM compute {name} "
            f"(model_type {family.model_type}). If both compute the same, remove auto_map from a copy of config.json"
        )
    return problems


def _layer_type_problems(family: Family, raw: Raw) -> list[str]:
    """Return what is wrong with `layer_types`, the kind of attention of each block, if config.json has it."""
    types = raw.get("layer_types") or []
    if "layer_types" not in family.keys and (SLIDING in types or (types and raw.get("sliding_window"))):
        return [
            f"layer_types in config.json ({family.model_type}) lets vLLM choose the blocks with a window, and "
            "transformers and the trainer do not read it; remove it from a copy of config.json"
        ]
    problems = [
        f"layer_types names {kind!r}; only {' and '.join(family.layer_types)} are supported"
        for kind in sorted({*types} - {*family.layer_types})
    ]
    if types and len(types) != raw.get("num_hidden_layers", len(types)):
        problems.append(f"layer_types has {len(types)} entries for num_hidden_layers={raw['num_hidden_layers']}")
    return problems
