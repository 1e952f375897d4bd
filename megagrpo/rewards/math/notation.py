r"""Rewrites the notations of one mathematical text to one: `\dfrac12`, `\left(`, `½`, `\mathrm{cm}`, `$...$`. Linear
time, standard library only."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import batched

from megagrpo.rewards.math.number_words import with_scales

# Pairs: a character, and what it becomes. A space ends the name of a command.
_PAIRS = r"""
× \times  · \cdot  ⋅ \cdot  ∙ \cdot  ÷ /  ∕ /  ⁄ /  √ \sqrt  ∛ \sqrt[3]  ± \pm  ∓ \mp  ∞ \infty  π \pi  λ \lambda
≤ \le  ≥ \ge  ≠ \ne  ≈ \approx  ∈ \in  ∪ \cup  ∩ \cap  ∅ \emptyset  Ø \emptyset  ℝ \mathbb{R}  ℤ \mathbb{Z}  → \to
º °  ℃ °C  ℉ °F  ∠ \angle  ′ '  ’ '  ％ %  ⟨ \langle  ⟩ \rangle  ⌊ \lfloor  ⌋ \rfloor  ⌈ \lceil  ⌉ \rceil
Δ \Delta  Ω \Omega  Σ \Sigma  Γ \Gamma  Φ \Phi
""".split()
_CHARACTERS = {
    **{
        chr(code): f"\\{unicodedata.name(chr(code)).split()[-1].lower()} "
        for code in range(0x3B1, 0x3CA)
        if code != 0x3C2
    },
    **{sign: text + " " * (text[0] == "\\" and text[-1].isalpha()) for sign, text in batched(_PAIRS, 2)},
    **dict.fromkeys("−–—‐‑﹣－", "-"),
    **dict.fromkeys("\u2061\u200b\u2062", ""),
    **dict.fromkeys("，、", ", "),
    "；": "; ",
}
_TABLE = str.maketrans(_CHARACTERS)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FUNCTIONS = "sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infty|theta"
_CURRENCY = {r"\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_CLOSING = {r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")"}
# Other names of functions, which may stand in \text{...}: of European books, and of code.
_NAMES = {
    **{"tg": r"\tan", "ctg": r"\cot", "cotg": r"\cot", "cosec": r"\csc", "arctg": r"\arctan", "lg": r"\log_{10}"},
    **{"asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan"},
}
_WRAPPED = {"abs": ("|", "|"), "floor": (r"\lfloor ", r" \rfloor"), "ceil": (r"\lceil ", r" \rceil")} | {
    "cbrt": (r"\sqrt[3]{", "}")
}
_NESTED = r"[^()]*(?:\([^()]*\)[^()]*)*"  # what stands between parentheses


def _function(names: str) -> str:
    r"""Return the pattern of a function's name, bare, as a command or in \text{...}."""
    return rf"(?:\\text\s*\{{\s*({names})\s*\}}|\\({names})@|(?<![\\A-Za-z])({names})@)"


def _renamed(match: re.Match[str]) -> str:
    return _NAMES[match[match.lastindex or 0]] + " "


def _enclosed(match: re.Match[str]) -> str:
    name = match[1] or match[2] or match[3]
    left, right = _WRAPPED[name.lower().removesuffix("ing")]
    return f"{left}{match[4]}{right}"


# (pattern, replacement), in order; @ is the end of a command's name. Each pattern needs linear time.
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+)", lambda m: f"^{{{m[1].translate(_RAISED)}}}"),
    (r"([₀₁₂₃₄₅₆₇₈₉]+)", lambda m: f"_{{{m[1].translate(_LOWERED)}}}"),
    (r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", lambda m: rf"\frac{{{unicodedata.normalize('NFKC', m[0]).replace('⁄', '}{')}}}"),
    (r"\\(?:boxed|fbox|(?:display|text|script)style|limits)@|\\phantom\{[^{}]*\}|(?<!\\)\\[()\[\]!]", ""),
    (r"\\[Bb]igg?[lrm]?@|\\(?:left|right|middle)@(?!arrow)\.?", ""),
    (r"(?<!\\)\\[\s,:;>]|\\q?quad@|\\(?:hspace|vspace)\*?\{[^{}]*\}|~|\\ensuremath@|\\\s?$", " "),
    (r"\\(?:(?:text|math)(?:rm|bf|it|sf|normal|tt|up)|mbox|hbox|emph|operatorname\*?|boldsymbol|bm)@", r"\\text"),
    (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
    (_function("|".join(_NAMES)), _renamed),
    (_function("[Aa]bs|floor|ceil(?:ing)?|cbrt") + rf"\s*\(({_NESTED})\)", _enclosed),
    (r"\\lb@", r"\\log_{2} "),
    (r"\\log\s*_\s*(?:e@|\{\s*e\s*\})", r"\\ln "),
    (r"\\text\s*\{\s*([ei]|[-\d.,/+]+|[\dA-F]+(?=\s*\}\s*_))\s*\}|(?<![\d}\s])\\text\s*\{\s*([A-Za-z])\s*\}", r"\1\2"),
    (r"\b([AaPp])\. ?[Mm]\b\.?|(?<=\d)\s*([AP])M\b", lambda m: f" {(m[1] or m[2]).lower()}m"),
    (r"\\[dtc]frac@", r"\\frac"),
    (r"\\[dt]binom@", r"\\binom"),
    (r"\{([^{}\\]*)\\choose@([^{}\\]*)\}", r"\\binom{\1}{\2}"),
    (r"\{([^{}]*)\\over@([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\}?", r"\\arc\1"),
    (r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}"),
    (r"\\frac\s*(\\(?:pi|theta|alpha|beta)@|[a-z](?![a-z]))\s*", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*([\da-z])", r"\1{\2}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ@)|\\(?:degree|textdegree)@|\^\{°\}", "°"),
    (r"\\%|\\text\s*\{\s*(?:percent|%|pct)\s*\}|\bpercent\b|\\percent@", "%"),
    (r"(?<=\d)\{,\}(?=\d{3})", ","),
    (r"\{([,;])\}", r"\1"),
    (r"\\leqs?l?a?n?t?(?![a-z])", r"\\le"),
    (r"\\geqs?l?a?n?t?(?![a-z])", r"\\ge"),
    (r"\\neq@", r"\\ne"),
    (r"<=|=<(?!=)", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=", r"\\ne "),
    (r"\\[lg]t@", lambda m: "<" if m[0] == r"\lt" else ">"),
    (r"\\(?:varnothing|O)@|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\(?:[lr]brace|[lr]brack|[lr]paren)@", lambda m: _CLOSING[m[0]]),
    (r"\\[lr]vert@", "|"),
    (r"\\dots@|\\ldots@|\\cdots@|…", "..."),
    (r"\*\*|__", lambda m: "^" if m[0] == "**" else m[0]),
    (r"\b[Ii]nf(?:inity|ty)?\b(?<!\\infty)", r"\\infty"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS})@", r"\\\1"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
]
_COMPILED = [(re.compile(pattern.replace("@", "(?![A-Za-z])")), replacement) for pattern, replacement in _REWRITES]
_BOLD = re.compile(r"^\s*(?:\*\*|__|`)|(?:\*\*|__|`)\s*$")
_EMPTY = re.compile(r"\\text\s*\{\s*\}")
_SPACE = re.compile(r"\s+")


def plain(text: str) -> str:
    r"""Return the text with one notation for each sign, without dollar signs around formulas, white space at the ends
    and a final period.

    A currency becomes the word `\money` with its name: "$5" and "\$5" are `\money{dollar}5`.
    """
    text = _BOLD.sub("", _BOLD.sub("", text.strip()))
    text = text.translate(_TABLE) if not text.isascii() else text
    for sign, name in _CURRENCY.items():
        text = text.replace(sign, rf"\money{{{name}}}")
    if text.count("$") % 2:  # an odd one is a currency
        text = re.sub(r"\$(?=\s*[\d.])", r"\\money{dollar}", text, count=1)
    text = text.replace("$", " ")
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    text = _EMPTY.sub("", with_scales(text))
    text = text if text.isascii() or "°" in text else unicodedata.normalize("NFKC", text)
    text = _SPACE.sub(" ", text).strip()
    while text.endswith((".", ",", ";", " ", "\\")) and not text.endswith(("...", r"\\")):
        text = text[:-1]
    return text
