"""The tokens that structured outputs allow, against an enumeration of the language."""

import itertools
import re
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from megagrpo.config.sections.rollout import RolloutSection, constraint_of
from megagrpo.data.tokens.grammar import Grammars, allowed
from megagrpo.data.tokens.tokenizer import Tokenizer as HuggingFaceTokenizer

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456 ~"{}:'
IDS = {letter: i for i, letter in enumerate(LETTERS)}
VOCABULARY = 41  # two ids have no token


def character_tokenizer() -> HuggingFaceTokenizer:
    """One token per character; `~` is the end token."""
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(IDS, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="~"))


class Grammar(Grammars):
    """Grammars with one constraint."""

    def __init__(self, **constraint):
        super().__init__(character_tokenizer, VOCABULARY)
        self.constraint = constraint_of(RolloutSection(structured_outputs=constraint).structured_outputs)
        self.compile(self.constraint)

    def masks(self, *where):
        return super().masks(self.constraint, *where)


def encode(text: str) -> np.ndarray:
    return np.array([IDS[letter] for letter in text], np.int64)


def following(language: list[str], before: str) -> set[str]:
    """The letters that may follow `before`, the end token included."""
    return {(text + "~")[len(before)] for text in language if (text + "~").startswith(before)}


def letters(masks: torch.Tensor) -> list[set[str]]:
    rows = allowed(masks, torch.arange(VOCABULARY))
    assert not rows[:, len(LETTERS) :].any()
    return [{LETTERS[i] for i in row.nonzero()[:, 0].tolist()} for row in rows]


PATTERN = "[ab]{2,3}c?"
LANGUAGE = [
    "".join(word)
    for n in range(2, 5)
    for word in itertools.product("abc", repeat=n)
    if re.fullmatch(PATTERN, "".join(word))
]


@pytest.mark.parametrize("response", ["abac~", "bb~", "abb"])
def test_a_regex_allows_what_continues_a_word_of_its_language(response):
    ids = encode("hello" + response)
    right = [following(LANGUAGE, response[:i]) for i in range(len(response))]
    constrained = Grammar(regex=PATTERN)
    assert letters(constrained.masks(ids, 5, 4, len(response))) == right
    pieces = [(4, 2), (6, len(response) - 2)]  # chunks of a pass
    for order in (pieces, pieces[1:], pieces[::-1], pieces):  # a rank may hold the second part only; passes begin again
        found = {position: letters(constrained.masks(ids, 5, position, count)) for position, count in order}
        assert found == {position: right[position - 4 :][:count] for position, count in order}


def test_each_turn_begins_the_constraint_again():
    ids = encode("xxab~yyba~")
    constrained, right = Grammar(regex=PATTERN), [following(LANGUAGE, before) for before in ("", "b", "ba")]
    constrained.masks(ids, 2, 1, 3)
    assert letters(constrained.masks(ids, 7, 6, 3)) == right


@pytest.mark.parametrize(
    ("constraint", "response"),
    [
        (dict(choice=["yes", "no", 'a "b']), ["yes~", "no~", 'a "b~']),
        (dict(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), ['{"a": 12}~']),
        (dict(grammar='root ::= "a" root "b" | "c"'), ["aacbb~", "c~"]),
    ],
    ids=["choice", "json", "grammar"],
)
def test_other_kinds_allow_their_words_and_no_others(constraint, response):
    constrained = Grammar(**constraint)
    for text in response:
        rows = letters(constrained.masks(encode("x" + text), 1, 0, len(text)))
        assert all(letter in row for letter, row in zip(text, rows, strict=True)) and "z" not in rows[0]
        with pytest.raises(
            ValueError, match="token 0 of a response, id 25, is one that the trainer's xgrammar forbids"
        ):
            constrained.masks(encode("xz"), 1, 0, 1)


def test_a_constraint_that_cannot_be_compiled_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"rollout\.structured_outputs\.regex: xgrammar cannot compile it"):
        Grammar(regex="[a")
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"with xgrammar: .*; install the xgrammar of vLLM's environment"):
        Grammar(regex="a")


def test_samples_of_different_constraints_are_read_in_any_order():
    grammars, patterns = Grammars(character_tokenizer, VOCABULARY), {"[ab]{2,3}c?": "abac~", "x+": "xx~", "c|d": "c~"}
    right = {
        pattern: letters(Grammar(regex=pattern).masks(encode("z" + text), 1, 0, len(text)))
        for pattern, text in patterns.items()
    }
    samples = {pattern: encode("z" + text) for pattern, text in patterns.items()}
    for start in (0, 1):  # one chunk of a sample after one of another one
        for pattern, ids in samples.items():
            rows = letters(grammars.masks(("regex", pattern), ids, 1, start, ids.size - 1 - start))
            assert rows == right[pattern][start:]
    both = encode("zab~")  # the same tokens under another constraint
    grammars.masks(("regex", "[ab]+"), both, 1, 0, 1)
    assert letters(grammars.masks(("regex", "ab"), both, 1, 1, 2)) == [{"b"}, {"~"}]
    same = samples["x+"]
    with pytest.raises(ValueError, match="token 0 of a response"):
        grammars.masks(("regex", "c|d"), same, 1, 0, 2)
    assert letters(grammars.masks(("regex", "x+"), same, 1, 0, 3)) == right["x+"]


def test_each_constraint_is_compiled_once_and_the_memory_of_them_is_bounded():
    """By xgrammar's own cache, which keeps compiled constraints up to a size, and one more."""
    grammars = Grammars(character_tokenizer, VOCABULARY)
    grammars.compile(("regex", "[ab]+"))
    size = grammars.compiler.get_cache_size_bytes()
    for _ in range(50):
        grammars.compile(("regex", "[ab]+"))
    assert grammars.compiler.get_cache_size_bytes() == size > 0
    small, sizes = Grammars(character_tokenizer, VOCABULARY, cache_bytes=4 * size), []
    for i in range(40):
        small.compile(("regex", f"[ab]+{i}"))
        sizes.append(small.compiler.get_cache_size_bytes())
    assert size < sizes[10] and max(sizes) < 6 * size
