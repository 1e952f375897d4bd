r"""Which part of a response is the answer. One rule for the rewards of mathematics, pass@k and maj@k; docs/answers.md
states it.

Imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megagrpo.rewards.math.notation import plain
from megagrpo.rewards.math.numbers import is_plain, last_number, number_text

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANCHOR = re.compile(
    r"####[ \t]*"
    r"|\b(?:answer|correct (?:option|choice))\b"
    r"(?:[^\n.:=#]{0,80}?\b(?:is|are|be)\b(?:[*_\s]{0,9}:)?|[ \t]{0,9}[*_)]{0,9}[ \t]{0,9}[:=])[*_ \t]*\s*"
    r"|^[#*_ \t]*(?:final )?answer[*_: \t]*\n\s*",
    re.IGNORECASE | re.MULTILINE,
)
_FORMULA = r"(?:\$\$[^$]+\$\$|\$[^$\n]+\$|\\\(.*?\\\)|\\\[.*?\\\])"
_FORMULAS = re.compile(
    rf"[*_\s]*({_FORMULA}(?:\s*(?:,|;|,?\s*\band\b|,?\s*\bor\b)\s*{_FORMULA})*)(?:\s*(?:\\?%|percent\b))?", re.DOTALL
)
_ONE_FORMULA = re.compile(rf"[^\d$\\]*({_FORMULA})[^$\\]*")
_ADVERB = re.compile(
    r"(?:therefore|thus|hence|simply|just|exactly|equal to|given "
    r"by|then|clearly|indeed|option|choice)\b[,:]?\s*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*\*)|\n|,?\s+(?:because|since|which|where|as)\b")
_SPACE = re.compile(r"\s+")
_LONGEST = 3000  # characters of an answer without a mark, and of one whose notation is rewritten
_CONCLUSION = 20_000  # characters at the end of a response in which an answer is announced

# The extractor that matches what each built-in correctness function reads.
READ_BY = {
    "exact_number": "number",
    "accuracy": "boxed",
    "reasoning_accuracy": "boxed",
    "cosine": "boxed",
    "reasoning_gym": "tag",
}


def final_answer(text: str, prefix: str = "") -> str | None:
    r"""Return the answer of a response as it is written; None without one. `prefix` is what the chat template opened
    for the response.

    It is, after the thought: the content of the last <answer>, in it or without it the last \boxed{...}, or else what
    follows the last "####", "the answer is" or "Answer:", or else the response if it is one line. An open thought and
    an open box have no answer.
    """
    inside, marked = _marked_part(text, prefix)
    if inside is None or marked == "box":
        return inside
    if (stated := _stated(inside)) is not None:
        return stated
    whole = inside.strip()
    return (whole or None) if marked or ("\n" not in whole and len(whole) <= _LONGEST) else None


def number_part(text: str, prefix: str = "") -> str | None:
    """Return the part of a response in which the last number is its answer: as `final_answer`, but without a tag or box
    it is all that follows the thought, or the number alone after the last "####"."""
    inside, marked = _marked_part(text, prefix)
    if inside is None or marked == "box":
        return inside
    _, mark, rest = inside.rpartition("####")
    line = rest.partition("\n")[0]
    return line if mark and is_plain(line) else inside


def after_thought(text: str, prefix: str = "") -> str | None:
    """Return what follows the last </think>; all text without a thought; None if one, even in `prefix`, is open."""
    whole = prefix + text
    opened, closed = whole.rfind("<think>"), whole.rfind("</think>")
    if opened > closed:
        return None
    return text.rpartition("</think>")[2]


def _marked_part(text: str, prefix: str) -> tuple[str | None, str]:
    """Return the part of a response after the thought that holds the answer, and its mark: "box", "tag", or "" for all
    of it. The part is None if the thought or the last box is not closed."""
    after = after_thought(text, prefix)
    if after is None:
        return None, ""
    tagged = _last_tag(after)
    inside = after if tagged is None else tagged
    if _BOX.search(inside):
        return last_box(inside), "box"
    return inside, "" if tagged is None else "tag"


def _last_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end]


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} with paired braces; None without one, or if the last
    one is not closed.

    Of boxes in a box the outermost counts.
    """
    starts: list[tuple[int, bool]] = []  # open braces: where the content begins, and whether it is a box's
    boxes: list[tuple[int, int]] = []
    last = -1
    for match in _BRACES.finditer(text):
        brace = match[0]
        if brace == "{" or (is_box := brace[-1] == "{" and len(brace) > 2):
            starts.append((match.end(), brace != "{"))
            last = match.end() if brace != "{" else last
        elif brace == "}" and starts:
            begin, is_box = starts.pop()
            if is_box:
                boxes = [box for box in boxes[-1:] if box[0] < begin] + [(begin, match.start())]
    if not boxes or boxes[-1][1] < last:
        bare = re.findall(r"\\(?:boxed|fbox)\s*([^\s{}$\\]+)", text) if last < 0 else []
        return bare[-1] if bare else None
    begin, end = boxes[-1]
    return text[begin:end].strip() or None


def _stated(text: str) -> str | None:
    """Return what follows the last announcement of an answer: formulas, or the sentence's rest; None without one."""
    text, end, is_bold = text[-_CONCLUSION:], None, False
    for match in _ANCHOR.finditer(text):
        end, is_bold = match.end(), match[0].rstrip().endswith("**")
    if end is None:
        return None
    rest = _ADVERB.sub("", text[end:], count=1) if _ADVERB.match(text, end) else text[end:]
    if formulas := _FORMULAS.match(rest):
        return formulas[0].strip("*_ \n")
    sentence = _SENTENCE_END.split(rest.strip(), maxsplit=1)[0]
    sentence = sentence.replace("**", "", 1) if is_bold else sentence  # the end of "The answer is **72** clips"
    if formula := _ONE_FORMULA.fullmatch(sentence):
        return formula[1]
    if sentence.count("}") > sentence.count("{"):  # the end of "\\text{Answer: 3}"
        sentence = sentence.removesuffix("}")
    return sentence.strip("*_ \t:") or None


def number(text: str) -> str | None:
    """Return the number that `exact_number` compares, with "1,000" and "1000.0" as "1000"; None without a number."""
    part = number_part(text)
    value = None if part is None else last_number(part)
    return None if value is None else number_text(value)


def tag(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> with single spaces; None without one."""
    inside = _last_tag(text)
    return None if inside is None else _single_spaced(inside)


def boxed(text: str) -> str | None:
    r"""Return `final_answer` without spaces and with one notation for each sign, so that `\frac12` and `$\dfrac{1}{2}$`
    are one vote."""
    answer = final_answer(text)
    if answer is None:
        return None
    return _SPACE.sub("", plain(answer) if len(answer) <= _LONGEST else answer) or None


def text(text: str) -> str | None:
    """Return the whole response with single spaces; None when it is empty."""
    return _single_spaced(text)


def _single_spaced(text: str) -> str | None:
    return _SPACE.sub(" ", text).strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {"number": number, "tag": tag, "boxed": boxed, "text": text}


def extractor(answer: str, function: str) -> Callable[[str], str | None] | None:
    """Return the extractor for `evaluation.answer`. "auto" means the built-in function's; None for other functions."""
    kind = READ_BY.get(function) if answer == "auto" else answer
    return EXTRACTORS[kind] if kind else None
