"""A model folder without weights: a config, and a tokenizer of bytes with a chat template."""

import json
from pathlib import Path

import tokenizers

LLAMA = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LLAMA |= dict(intermediate_size=128, vocab_size=258, max_position_embeddings=2048, rms_norm_eps=1e-6)
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|start|>"


def save_byte_model(folder: Path) -> None:
    """Write the model's files; the file of weights is empty."""
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bare = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    bare.add_special_tokens(["<|start|>", "<|end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").touch()
