"""Tiny random vision-language models with a tokenizer and an image processor, and prompts with images of several
sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny_square
import torch
from PIL import Image
from tiny_families import write_model as save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.families.hf_config import load_hf_config
from megagrpo.weights.bridge.image_facts import image_reader
from tests.family_examples import EXAMPLES

# vLLM asks for the tokens of capital letters where it serves Qwen3.5.
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPECIAL = [
    "<|end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_start|>",
    "<|im_end|>",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
TEXT = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.08,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Kind:
    """What differs between the models: keys of the tower, of the text model, of the rotation, and a patch's size."""

    tower: dict[str, Any]
    sections: tuple[int, int, int]  # of the rotation
    text: dict[str, Any]
    patch: int
    rope: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)  # of the text model in vLLM on a CPU
    served_dtype: str = "float32"


_TOWER = dict(depth=2, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=128, initializer_range=0.08)
# With four decoder blocks on two stages, each stage adds features of the tower.
_DEEP = _TOWER | dict(depth=3, patch_size=16, num_position_embeddings=16, deepstack_visual_indexes=[0, 1, 2])
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, head_dim=32)
_FIRST = dict(depth=2, embed_dim=64, hidden_size=128, num_heads=2, mlp_ratio=2, patch_size=14, initializer_range=0.08)
_INTERLEAVED = dict(mrope_interleaved=True)
_PLAIN = _TOWER | dict(patch_size=16, num_position_embeddings=16)
_DELTA = dict(head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, rms_norm_eps=1e-2)
_DELTA |= dict(linear_value_head_dim=24, full_attention_interval=2)
KINDS = {
    "qwen2_vl": Kind(_FIRST, sections=(4, 6, 6), text={}, patch=14),
    "qwen2_5_vl": Kind(
        _TOWER | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1]), sections=(4, 6, 6), text={}, patch=14
    ),
    "qwen3_vl": Kind(_DEEP, sections=(6, 5, 5), text=dict(head_dim=32), patch=16, rope=_INTERLEAVED),
    "qwen3_vl_moe": Kind(_DEEP, sections=(6, 5, 5), text=_EXPERTS, patch=16, rope=_INTERLEAVED),
    "qwen3_5": Kind(
        _PLAIN,
        sections=(3, 3, 2),
        text=_DELTA,
        patch=16,
        rope=_INTERLEAVED | dict(partial_rotary_factor=0.5),
        served=EXAMPLES["qwen3_5_text"].served,
        served_dtype="bfloat16",
    ),
    "qwen3_5_moe": Kind(
        _PLAIN,
        sections=(3, 3, 2),
        text=_DELTA | _EXPERTS | dict(shared_expert_intermediate_size=24),
        patch=16,
        rope=_INTERLEAVED | dict(partial_rotary_factor=0.5),
        served=EXAMPLES["qwen3_5_text"].served,
        served_dtype="bfloat16",
    ),
    "gemma3": Kind({}, sections=(0, 0, 0), text={}, patch=8),
}


def tokenizer():
    """A tokenizer of characters."""
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    raw.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def write_model(folder: Path, seed: int = 0, kind: str = "qwen2_5_vl", released: bool = True, **text) -> None:
    """Write the model, its tokenizer and its image processor: experts as in releases, or as transformers saves them."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if kind == "gemma3":
        return tiny_square.write_model(folder, seed, **text)
    words, own = tokenizer(), KINDS[kind]
    words.save_pretrained(folder)
    start, end, image, video = (words.convert_tokens_to_ids(token) for token in SPECIAL[1:5])
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[*own.sections]) | own.rope
    sizes = dict(vocab_size=len(words) + 6, eos_token_id=words.eos_token_id, rope_parameters=rope)
    config = AutoConfig.for_model(
        kind,
        text_config=TEXT | sizes | own.text | text,
        vision_config=own.tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=text.get("tie_word_embeddings", True),
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    (save if released else type(model).save_pretrained)(model, folder)
    limits = dict(shortest_edge=28 * 28, longest_edge=28 * 28 * 16)
    Qwen2VLImageProcessorPil(patch_size=own.patch, size=limits).save_pretrained(folder)


def is_text(name: str) -> bool:
    """Whether a tensor of these models is the text model's."""
    return not any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector."))


def image(width: int, height: int, seed: int) -> Image.Image:
    """Coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


# Questions, with the sizes of their images
QUESTIONS = [
    ("which?", [(84, 56)]),
    ("no image", []),
    ("are both equal?", [(30, 100), (56, 56)]),
    ("one more", [(28, 28)]),
]


def asked(folder: Path) -> list[tuple[list[dict], tuple[int, ...], dict]]:
    """(messages, token ids, inputs) of each question."""
    words = load_tokenizer(folder)
    reader, found = image_reader(folder, load_hf_config(folder), words), []
    for number, (text, sizes) in enumerate(QUESTIONS):
        pictures = [image(*size, seed) for seed, size in enumerate(sizes, 10 * number)]
        messages, images = reader.question([dict(role="user", content=text)], {"images": pictures})
        if images:
            found.append((messages, *reader.placed(words.render(messages, expand=reader.expanded), images)))
        else:
            found.append((messages, words.render(messages), {}))
    return found


@torch.no_grad()
def full_logits(
    folder: Path,
    samples: list[tuple[list[int], dict]],
    dtype: torch.dtype = torch.float32,
    adapter: Path | None = None,
) -> list[torch.Tensor]:
    """transformers' logits [L, V] as float32 for each (token ids, inputs), with PEFT's `adapter`."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval().get_base_model()
    return [logits_of(model, token_ids, inputs).float() for token_ids, inputs in samples]


def logits_of(model: Any, token_ids: list[int], inputs: dict) -> torch.Tensor:
    """The logits [L, V] of transformers' `model`."""
    ids = torch.tensor([token_ids])
    if not inputs:
        return model(input_ids=ids).logits[0]
    pixels, grids = inputs["pixel_values"], torch.as_tensor(inputs["image_grid_thw"])
    of_images = torch.zeros_like(ids)
    for start, count in zip(inputs["image_starts"], inputs["image_tokens"], strict=True):
        of_images[0, start : start + count] = 1
    if model.config.model_type == "gemma3":
        return tiny_square.square_logits(model, ids, pixels.to(model.dtype), of_images)[0]
    more = dict(image_grid_thw=grids, mm_token_type_ids=of_images)
    if torch.equal(of_images, (ids == model.config.image_token_id).long()):
        return model(input_ids=ids, pixel_values=pixels, **more).logits[0]
    # transformers takes each image token for a part of an image, also one that was sampled
    rows, of_tower = model.get_input_embeddings()(ids), model.model.visual(pixels, grid_thw=grids)
    rows[of_images.bool()] = of_tower.pooler_output
    positions, _ = model.model.get_rope_index(ids, **more)
    levels = getattr(of_tower, "deepstack_features", None)
    deep = {} if levels is None else dict(visual_pos_masks=of_images.bool(), deepstack_visual_embeds=levels)
    states = model.model.language_model(inputs_embeds=rows, position_ids=positions, **deep).last_hidden_state
    return model.lm_head(states)[0]
