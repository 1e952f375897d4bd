"""The processor of a tiny Qwen3-Omni, which vLLM's server of speech reads at its start."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

_WORDS = ("image", "video", "audio", "vision_bos", "vision_eos", "audio_bos", "audio_eos")


def write_processor(folder: Path, first_token: int) -> None:
    """Save it with a token for each kind of input; their ids begin with `first_token`."""
    words = {f"{word}_token": f"<|{word}|>" for word in _WORDS}
    vocabulary = {word: first_token + index for index, word in enumerate(words.values())}
    tokenizer = Tokenizer(WordLevel(vocabulary | {"<unk>": 0}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=words)
    sounds = WhisperFeatureExtractor(feature_size=16)
    Qwen3OmniMoeProcessor(Qwen2VLImageProcessor(), Qwen2VLVideoProcessor(), sounds, fast).save_pretrained(folder)
