"""Writes a small mixture of experts with random weights beside this file, or to the folder in the first argument.

It has four layers of 32 experts, 2 per token, in bf16, and reads single characters. Training starts from nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,:"
END = "<|end|>"
SIZES = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
EXPERTS = dict(num_experts=32, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)


def write_model(out: Path) -> None:
    """Write the model and its tokenizer to `out`."""
    raw = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(out)
    ids = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    # weights of this size decide between experts as trained ones do; with the usual 0.02 all experts are alike
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, **ids, initializer_range=0.12)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model"
    write_model(folder)
    print(f"written to {folder}")
