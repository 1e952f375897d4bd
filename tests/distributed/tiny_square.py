"""A tiny random Gemma 3 with images: a tokenizer that joins line breaks, an image processor, and transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

SIDE, TOKENS, WINDOW = 48, 9, 12  # pixels and tokens of an image, tokens of a window
MARKS = dict(boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>")
SPECIAL = ["<eos>", "<start_of_turn>", "<end_of_turn>", *MARKS.values()]
LINES = ["\n" * count for count in range(1, 5)]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_TOWER = "vision_tower."
_SIGLIP = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE)
_SIGLIP |= dict(model_type="siglip_vision_model", patch_size=8, vision_use_head=False)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPE = {_SLIDING: dict(rope_type="default", rope_theta=100.0), _FULL: dict(rope_type="default", rope_theta=1e4)}
_TEXT = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    query_pre_attn_scalar=32,
    max_position_embeddings=512,
    initializer_range=0.08,
    sliding_window=WINDOW,
    rope_parameters=_ROPE,
    bos_token_id=None,
    pad_token_id=None,
)


def tokenizer():
    """A tokenizer of characters in which up to four line breaks are one token."""
    from transformers import PreTrainedTokenizerFast

    names = [*CHARACTERS, *LINES]
    merges = [(LINES[0], LINES[0]), (LINES[1], LINES[0]), (LINES[1], LINES[1])]
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=merges))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>", extra_special_tokens=MARKS
    )
    made.chat_template = TEMPLATE
    return made


def write_model(folder: Path, seed: int = 0, **text: Any) -> None:
    """Write the model, its tokenizer and its processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = tokenizer()
    blocks = text.get("num_hidden_layers", 2)
    sizes = dict(vocab_size=len(words) + 6, eos_token_id=words.eos_token_id)
    sizes |= dict(layer_types=[_FULL if block % 2 else _SLIDING for block in range(blocks)])
    ids = {f"{name}_index": words.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    tied = text.get("tie_word_embeddings", True)
    config = AutoConfig.for_model(
        "gemma3",
        text_config=_TEXT | sizes | text,
        vision_config=_SIGLIP,
        mm_tokens_per_image=TOKENS,
        tie_word_embeddings=tied,
        **ids,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "mm_input_projection" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")  # names as in releases, which vLLM needs
    tensors = {name.replace(_TOWER, f"{_TOWER}vision_model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    images = Gemma3ImageProcessorPil(size=dict(height=SIDE, width=SIDE))
    Gemma3Processor(images, words, chat_template=TEMPLATE, image_seq_length=TOKENS).save_pretrained(folder)


def square_logits(model: Any, ids: torch.Tensor, pixels: torch.Tensor, of_images: torch.Tensor) -> torch.Tensor:
    """transformers' logits [1, L, V] of ids [1, L]; `of_images` [1, L] is 1 at tokens of images."""
    if torch.equal(of_images, (ids == model.config.image_token_id).long()):
        return model(input_ids=ids, pixel_values=pixels, token_type_ids=of_images).logits
    # transformers takes each image token for a part of an image, also one that was sampled
    rows = model.get_input_embeddings()(ids)
    rows[of_images.bool()] = model.get_image_features(pixels).pooler_output.flatten(0, 1)
    return model(inputs_embeds=rows, token_type_ids=of_images).logits
