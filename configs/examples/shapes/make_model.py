"""Writes a tiny Qwen2.5-VL with random weights beside this file, or to the folder in the first argument.

The model has four layers and a vision tower of two, and reads single characters. Training starts from nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ?"
END, START, STOP, PICTURE, VIDEO = "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
SIDE = 56  # pixels of a picture: two by two tokens
TEXT = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.08,
    bos_token_id=None,
    pad_token_id=None,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]),
)
TOWER = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    out_hidden_size=128,
    patch_size=14,
    window_size=56,
    fullatt_block_indexes=[1],
    initializer_range=0.08,
)


def write_model(out: Path) -> None:
    """Write the model, its tokenizer and its image processor to `out`."""
    raw = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    raw.add_special_tokens([END, START, STOP, PICTURE, VIDEO])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (END, START, STOP, PICTURE, VIDEO)}
    config = Qwen2_5_VLConfig(
        text_config=TEXT | dict(vocab_size=len(tokenizer), eos_token_id=ids[END], tie_word_embeddings=False),
        vision_config=TOWER,
        image_token_id=ids[PICTURE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[STOP],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(out)
    Qwen2VLImageProcessorPil(size=dict(shortest_edge=28 * 28, longest_edge=SIDE * SIDE)).save_pretrained(out)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model"
    write_model(folder)
    print(f"written to {folder}")
