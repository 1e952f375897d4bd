"""Qwen2.5-Omni and Qwen3-Omni around Qwen's text models. The thinker reads text, images and
sounds and writes text; it is trained on text. The talker and the vocoder, which speak, stay as loaded."""

from __future__ import annotations

from collections.abc import Callable

from megagrpo.families.shared.vision import axis_problems
from megagrpo.families.shared.wrapper import THINKER, Naming, Raw, Wrapper

_NAMES = Naming("thinker.model.", "thinker.")
_TIES = "tie_word_embeddings"
_IGNORED = (
    *"talker_config token2wav_config code2wav_config enable_audio_output audio_token_index".split(),
    *"position_id_per_seconds seconds_per_chunk audio_start_token_id audio_end_token_id user_token_id".split(),
    *"im_start_token_id im_end_token_id tts_pad_token_id tts_bos_token_id tts_eos_token_id system_token_id".split(),
    *"assistant_token_id enable_talker ignore_index init_std".split(),
    *"tts_text_start_token_id tts_text_end_token_id tts_text_pad_token_id".split(),
)
_AXES = axis_problems(interleaved=True)


def _omni(kind: str, *classes: str, text: str, defaults: Raw, problems: Callable[[Raw], list[str]]) -> Wrapper:
    return Wrapper(
        kind,
        classes[0],
        classes=classes[1:],
        prefix=_NAMES.decoder,
        texts=(text,),
        defaults=defaults | dict(num_key_value_heads=4, rope_theta=1e6),
        problems=problems,
        ignored=_IGNORED,
        untrained=(r"(talker|token2wav|code2wav)\..+", r"thinker\.(audio_tower|visual)\..+"),
        modules=_NAMES,
    )


def _ties(raw: Raw, default: bool) -> list[str]:
    """Return the problem of a head that transformers, which reads the thinker's key, and vLLM, which reads the text
    model's, do not tie alike. `default` is of the text model."""
    outer, inner = raw.get(_TIES, False), raw["text_config"].get(_TIES, default)
    said = f"{THINKER} of config.json has {_TIES}={outer}, but its text_config {inner}"
    return [] if outer == inner else [f"{said}; set both to what fits the weights"]


def _qwen3_problems(raw: Raw) -> list[str]:
    problems = _ties(raw, default=False) + _AXES(raw)
    if raw["text_config"].get("use_sliding_window"):
        problems.append("config.json has use_sliding_window=True, and transformers computes no windows here; remove it")
    return problems


QWEN2_5_OMNI = _omni(
    "qwen2_5_omni",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    text="qwen2_5_omni_text",
    defaults={},
    problems=lambda raw: _ties(raw, default=True),
)
QWEN3_OMNI = _omni(
    "qwen3_omni_moe",
    "Qwen3OmniMoeForConditionalGeneration",
    text="qwen3_omni_moe_text",
    defaults=dict(norm_topk_prob=True),
    problems=_qwen3_problems,
)
