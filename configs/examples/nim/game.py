"""Nim: two players take 1, 2 or 3 stones in turn, and the player who takes the last one wins. The policy plays both."""

import json
import random
import re
from pathlib import Path

from openai import OpenAI

# the legal moves of the model before the first step, by number of stones: first_moves.py samples them
FIRST_MOVES = json.loads(Path(__file__).with_name("first_moves.json").read_text())


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


def move(reply, stones):
    """Return the number of stones that a reply takes; 0 if it is no legal move."""
    number = re.search(r"\d+", reply)
    return int(number[0]) if number and 1 <= int(number[0]) <= min(3, stones) else 0


def play(stones, frozen_role=None):
    """Play one game; `frozen_role` is played by the first model. Returns 1 to the winner and 0 to the loser."""
    random.seed()  # forked games would draw the same numbers
    stones, players, asked, client = int(stones), ["first", "second"], set(), OpenAI()
    while True:
        player, other = players
        if player == frozen_role:
            taken = random.choice(FIRST_MOVES[str(stones)] or [1])
        else:
            asked.add(player)
            reply = client.chat.completions.create(model=f"policy:{player}", messages=question(stones))
            taken = move(reply.choices[0].message.content, stones)
        if not taken:  # who breaks the rules loses
            return {role: float(role == other) for role in asked}
        stones -= taken
        if stones == 0:
            return {role: float(role == player) for role in asked}
        players = [other, player]
