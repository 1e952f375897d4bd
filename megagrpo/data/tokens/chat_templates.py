"""Reads chat templates: the variables that they use, and the thought that they open for a response."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from megagrpo.config.sections.data import RENDERER_ARGUMENTS
from megagrpo.suggestions import did_you_mean

# A tag that opens a thought: <think>, <reasoning>, <seed:think>, <|START_THINKING|>, <start_working_out>; not
# <|END_THINKING|>. The bounds keep the search linear in time.
_OPENING = re.compile(r"<(?![|_]?end)([\w:|.-]{0,24}?(?:think|thought|reason|working)[\w:|.-]{0,24})>", re.IGNORECASE)
# transformers' own tag, which plain jinja2 does not know
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
PLAIN_TEXT = "none"  # the value of data.chat_template for plain-text prompts
PROMPT_TAIL = 64  # tokens at the end of a prompt that hold an opened tag and the white space after it


def read_chat_template(chat_template: str | None) -> str | None:
    """Return the text of `data.chat_template`: a file's content; Jinja text, None and `none` unchanged. Raises
    ValueError for any other value."""
    if chat_template is None or chat_template == PLAIN_TEXT or "{{" in chat_template or "{%" in chat_template:
        return chat_template
    if os.path.isfile(chat_template):
        try:
            return Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"data.chat_template: {chat_template} is not UTF-8 text: {error}; save it in UTF-8"
            ) from error
    raise ValueError(f"data.chat_template: {missing_template(chat_template)}")


def missing_template(chat_template: str) -> str:
    """Return the text for a template that is neither Jinja text nor a file."""
    return f"no file {chat_template}; correct the path, or write Jinja text (with {{{{ or {{%) or `{PLAIN_TEXT}`"


def check_kwargs(names: Collection[str], template: str | None, key: str = "data.chat_template_kwargs") -> None:
    """Raise ValueError for a variable that cannot be set or that `template` (Jinja text or None) does not use."""
    if not names:
        return
    if taken := [name for name in names if name in RENDERER_ARGUMENTS]:
        raise ValueError(
            f"{key}: `{taken[0]}` is an argument of the renderer, not a variable of the template; leave it out"
        )
    if template is None or template == PLAIN_TEXT:
        raise ValueError(
            f"{key}: {', '.join(names)} needs a chat template; set data.chat_template to Jinja text or a file"
        )
    used = variables(template)
    if used is not None and (unknown := [name for name in names if name not in used]):
        known = sorted(used - set(RENDERER_ARGUMENTS))
        hint = did_you_mean(unknown[0], known) or (f"; it uses {', '.join(known)}" if known else "")
        raise ValueError(
            f"{key}: the chat template does not use `{unknown[0]}`{hint}; correct the name, or leave it out"
        )


@lru_cache(16)
def variables(template: str) -> frozenset[str] | None:
    """Return the variables that a template looks up; None when it cannot be parsed, which rendering reports."""
    from jinja2 import Environment, TemplateError, meta  # not for ranks that load no tokenizer

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))) - set(
            environment.globals
        )
    except TemplateError:
        return None


def opened_thought(prompt: str, prefill: str = "") -> str:
    """Return the end of a rendered prompt that opens the response's thought, such as "<think>\\n"; "" without one.

    Only white space may follow the tag. In `prefill`, a last assistant message's text, a thought may have begun.
    """
    text = prefill or prompt
    tags = list(_OPENING.finditer(text))
    if not tags:
        return ""
    opened, rest = text[tags[-1].start() :], text[tags[-1].end() :]
    return opened if (not rest.strip() if not prefill else f"</{tags[-1][1]}>" not in rest) else ""
