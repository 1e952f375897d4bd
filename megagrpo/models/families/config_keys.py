"""Checks the keys of config.json: a family reads some, others change nothing, and every other key is rejected by name.
Imports no torch."""

from __future__ import annotations

from typing import Any

from megagrpo.models.families.family import COMMON, FULL, SLIDING, Family, Raw, rope

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
_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Kind of rotary scaling -> the parameters that transformers and vLLM read alike. `finetuned` is a comment in the first
# Yarn releases.
ROPE_KEYS = {
    "default": _ROPE,
    "linear": (*_ROPE, "factor", "original_max_position_embeddings"),
    "llama3": (*_ROPE, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *_ROPE,
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        *("mscale", "mscale_all_dim", "finetuned"),
    ),
    # phi3 rejects four of these with its own messages.
    "longrope": (
        *_ROPE,
        *("short_factor", "long_factor", "original_max_position_embeddings"),
        *("factor", "attention_factor", "short_mscale", "long_mscale"),
    ),
}


def key_problems(family: Family, raw: Raw) -> list[str]:
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
    known = HARMLESS.union(COMMON, family.keys, family.ignored, fixed, ["layer_types"])  # layer_type_problems checks it
    unknown = [
        f"{_has(family, key, value)}, {_UNKNOWN}"
        for key, value in raw.items()
        if key not in known and value is not None
    ]
    return wrong + unknown + _rope_problems(family, raw)


_UNKNOWN = (
    "a key that the trainer does not know and that may change what the model computes. If the model's own code does "
    "not read it, remove it from a copy of config.json; else this model is not supported: docs/add_a_model.md"
)


def _has(family: Family, key: str, value: Any) -> str:
    text = repr(value)
    return f"model: config.json ({family.model_type}) has {key}={text if len(text) <= 60 else text[:57] + '...'}"


def _rope_problems(family: Family, raw: Raw) -> list[str]:
    """Return unknown rotary parameters, of all blocks, or of each kind of attention if config.json separates them."""
    problems = []
    for section in ("rope_scaling", "rope_parameters"):
        values = raw.get(section) or {}
        by_kind = "rope_local_base_freq" in family.keys
        parts = {f"{section}.{kind}": values[kind] for kind in (FULL, SLIDING) if by_kind and kind in values}
        for name, parameters in (parts or {section: values}).items():
            kind = rope({"rope_parameters": parameters or {}} if parts else raw)["rope_type"]
            known = ROPE_KEYS.get(kind, parameters or ())  # an unknown kind has its own error
            problems += [
                f"{_has(family, f'{name}.{key}', value)}, {_UNKNOWN}"
                for key, value in (parameters if isinstance(parameters, dict) else {}).items()
                if key not in known and value is not None
            ]
    return problems


def class_problems(family: Family, raw: Raw) -> list[str]:
    """Return why the class is not the family's, by `architectures`, which vLLM reads, or `auto_map` (remote code)."""
    problems, name = [], family.architecture
    classes, remote = raw.get("architectures"), raw.get("auto_map")
    if classes and name not in (classes if isinstance(classes, list) else [classes]):
        problems.append(
            f"model: config.json has architectures={classes} with model_type={family.model_type}, whose class is "
            f"{name}. If that class fits the model, set architectures to [{name!r}] in a copy of config.json; else it "
            "is not supported: docs/add_a_model.md"
        )
    remote = remote.get("AutoModelForCausalLM") if isinstance(remote, dict) else remote
    if remote and str(remote).rpartition(".")[2] != name:
        problems.append(
            f"model: config.json has auto_map with {remote}, custom code; the trainer and vLLM compute {name} "
            f"(model_type {family.model_type}). If both compute the same, remove auto_map from a copy of config.json"
        )
    return problems
