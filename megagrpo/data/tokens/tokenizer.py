"""Converts text and chat messages to token ids and back, with Hugging Face tokenizers.

Packages are imported when a tokenizer is loaded: transformers opens 6,000 files, and most ranks load no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megagrpo.config import RunConfig
from megagrpo.data.tokens.chat_templates import PLAIN_TEXT as PLAIN_TEXT
from megagrpo.data.tokens.chat_templates import check_kwargs
from megagrpo.data.tokens.chat_templates import read_chat_template as read_chat_template
from megagrpo.data.tokens.thinking import thinking_of
from megagrpo.regular_files import irregular_entry
from megagrpo.types import Thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megagrpo.data.images.prompt_images import ImageReader

Messages = str | list[dict[str, Any]]
# End of a rendered conversation: an opened assistant turn, the last message without its end, or the last message with
# its end.
Ending = Literal["generate", "continue", "closed"]
# Texts that tell a turn's thoughts and calls apart. Some models have special tokens for them.
TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"
CUSTOM_CODE = (
    "has a tokenizer of custom code (auto_map in tokenizer_config.json), which is never run; write it as "
    "tokenizer.json (docs/model_notes.md) and name that folder"
)


def tokenizer_of(config: RunConfig, model_folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a run, with `data.chat_template_kwargs`. Special tokens in `rollout.stop` are end tokens.

    Raises ValueError when there is no tokenizer, for variables that the chat template does not use, for stop strings
    that no text can contain, and for a budget of thoughts that the model cannot have."""
    tokenizer = load_tokenizer(config.model.tokenizer or model_folder, model_folder)
    tokenizer.eos_token_ids = _with_stop_tokens(tokenizer, config.rollout.stop)
    tokenizer.template_kwargs = config.data.chat_template_kwargs
    template = tokenizer.template(read_chat_template(config.data.chat_template))
    check_kwargs(tokenizer.template_kwargs, template)
    budget = config.rollout.max_thinking_tokens, config.rollout.thinking_end, config.rollout.max_completion_length
    tokenizer.thinking = thinking_of(*budget, tokenizer, f"{template} {config.data.system_prompt}")
    return tokenizer


def _with_stop_tokens(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """Return the end tokens, with the special tokens in `rollout.stop`."""
    special = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids()} if stop else {}
    for index, text in enumerate(stop):
        if text not in special and (inside := [token for token in special if token in text]):
            raise ValueError(
                f"rollout.stop.{index}: {text!r} contains the special token {inside[0]}, which the text of a response "
                "leaves out; name the token alone"
            )
    return tuple(sorted({*tokenizer.eos_token_ids, *(special[text] for text in stop if text in special)}))


def load_tokenizer(path: str | Path, model_path: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer from a Hugging Face folder or hub name.

    `model_path` holds generation_config.json, if `path` does not. Raises ValueError when `path` has no tokenizer."""
    if Path(path).is_dir() and (odd := irregular_entry(path)):
        raise ValueError(f"model.tokenizer: {odd} is no regular file; remove it, or download the file again")
    from transformers import AutoTokenizer

    try:
        # None, the default, asks on a terminal whether to run the folder's code
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # for a damaged file the tokenizers library raises a bare Exception
        if "trust_remote_code" in str(error):
            raise ValueError(f"model.tokenizer: {path} {CUSTOM_CODE}") from None
        raise ValueError(
            f"model.tokenizer: {path} is neither a tokenizer's folder nor a hub name that can be loaded: {error}"
        ) from error
    return Tokenizer(tokenizer, _generation_eos(model_path or path))


def _beginning(text: str) -> str:
    """Return the first characters of a text, on one line, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60]}..."


class Tokenizer:
    """A tokenizer of transformers.

    `eos_token_ids` are all ids that end a response, from the tokenizer and generation_config.json, sorted.
    `template_kwargs` are variables of all prompts, and `images` reads their images; None: they have none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, more_eos: Iterable[int] = ()):
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_token_ids = tuple(sorted({*own, *more_eos}))
        self._chat_template: str | Mapping[str, str] | None = tokenizer.chat_template  # in Jinja, or several by name
        self.template_kwargs: Mapping[str, Any] = {}
        self.images: ImageReader | None = None  # set by a caller that knows the model
        self.thinking: Thinking | None = None  # of the run
        self.tokenizer: Any = tokenizer  # its methods return one of several types, by their arguments
        left_out = {i for i in self.special_ids() if self.token_text(i) not in TAGS}
        self._left_out = left_out if len(left_out) < len(self.special_ids()) else None  # None: no tag is special

    def template(self, configured: str | None, tools: Sequence[dict[str, Any]] = ()) -> str | None:
        """Return the template of prompts with these `tools`: `configured`, as `data.chat_template` names it, or else
        the tokenizer's. Of named templates this is `tool_use` with tools, if there is one, else `default`, as in
        transformers. None without any. Raises ValueError for named templates without a default."""
        if configured is not None:
            return configured
        named = self._chat_template
        if not isinstance(named, Mapping):
            return named
        for name in ("tool_use", "default") if tools else ("default",):
            if name in named:
                return named[name]
        raise ValueError(
            f"data.chat_template: the tokenizer has the chat templates {', '.join(sorted(named))}, but no default; set "
            "Jinja text or a file"
        )

    def __len__(self) -> int:
        """Number of token ids, added tokens included."""
        return len(self.tokenizer)

    def pieces(self) -> list[str]:
        """Return the token of each id, in the tokenizer's notation."""
        return self.tokenizer.convert_ids_to_tokens(range(len(self)))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`, in which control tokens such as <s> are recognized. `add_special_tokens` adds
        BOS if the model expects it."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """Return the text of the ids, without special tokens except TAGS; with `special` also theirs."""
        if self._left_out is not None and not special:
            token_ids, special = [i for i in token_ids if i not in self._left_out], True
        options = dict(skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return self.tokenizer.decode(list(token_ids), **options)

    def token_text(self, token_id: int) -> str:
        """Return the text of a special token, such as "</s>"."""
        return self.tokenizer.convert_ids_to_tokens(token_id) or ""

    def special_ids(self) -> list[int]:
        """Return the ids of special tokens, which `decode` leaves out, except TAGS."""
        added = self.tokenizer.added_tokens_decoder.items()
        return [token_id for token_id, token in added if token.special]

    def _apply_template(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Render chat messages as text. `options` are arguments of transformers' renderer and template variables."""
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def apply_template(
        self,
        messages: list[dict[str, Any]],
        template: str,
        ending: Ending,
        tools: Sequence[dict[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render chat messages as text; `tools` are JSON schemas that the template may show to the policy. `kwargs` are
        variables of the template besides `template_kwargs`."""
        options = dict(
            chat_template=template,
            add_generation_prompt=ending == "generate",
            continue_final_message=ending == "continue",
            tools=list(tools) or None,  # some templates test only for a list
        )
        return self._apply_template(messages, {**options, **self.template_kwargs, **(kwargs or {})})

    def render(
        self,
        prompt: Messages,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        expand: Callable[[str], str] = str,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt, which the engine continues.

        A string prompt becomes a user message, after the `system_prompt` if any. A list of messages is rendered
        unchanged; if its last message is the assistant's, the engine continues that message. `chat_template` (Jinja
        text) replaces the tokenizer's template. With `chat_template` `none`, or without any template, a string prompt
        is plain text with BOS. Templates may add a system message, and show `tools` (JSON schemas). `kwargs` are
        variables of the template besides `template_kwargs`, and `expand` changes the text that the template renders.
        Raises ValueError when a template is needed but missing."""
        text = self.rendered(prompt, system_prompt, chat_template, tools, kwargs)
        if text is None:
            return tuple(self._plain(prompt, system_prompt))
        # the template writes BOS if the model expects it
        return tuple(self.encode(expand(text), add_special_tokens=False))

    def encode_once(self, text: str) -> list[int]:
        """Return a text's token ids after BOS, if the model expects it. Text that begins with BOS gets no second."""
        beginning, ids = self.encode("", add_special_tokens=True), self.encode(text.lstrip(), add_special_tokens=False)
        if beginning and ids[: len(beginning)] == beginning:
            return ids
        return self.encode(text, add_special_tokens=True)

    def rendered(
        self,
        prompt: Messages,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        ending: Ending | None = None,
    ) -> str | None:
        """Return the text that `render` encodes, special tokens of the template included; None without a template.
        Without an `ending`, an assistant's last message is continued.

        Raises ValueError with the template's error, which can be of any type."""
        template = self.template(chat_template, tools)
        if template is None or template == PLAIN_TEXT:
            return None
        messages = as_messages(prompt, system_prompt)
        try:
            ending = ending or ("continue" if messages[-1]["role"] == "assistant" else "generate")
            return self.apply_template(messages, template, ending, tools, kwargs)
        except Exception as error:
            from jinja2 import TemplateSyntaxError

            where = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ValueError(
                f"data.chat_template: {_beginning(template)}{where} cannot render {_beginning(repr(messages))}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}; correct the template, or the prompt"
            ) from error

    def _plain(self, prompt: Messages, system_prompt: str | None) -> list[int]:
        if isinstance(prompt, str) and system_prompt is None:
            return self.encode_once(prompt)
        what = "data.system_prompt needs" if isinstance(prompt, str) else "prompts with chat messages need"
        raise ValueError(
            f"data.chat_template: {what} a chat template, but the tokenizer has none; set Jinja text or a file"
        )


def as_messages(prompt: Messages, system_prompt: str | None) -> list[dict[str, Any]]:
    """Return a string prompt as a user message, after the system prompt if any; messages are returned unchanged."""
    if not isinstance(prompt, str):
        return prompt
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": prompt}]


def _generation_eos(path: str | Path) -> list[int]:
    """Return the end tokens in generation_config.json; empty without that file."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(str(path)).eos_token_id
    except OSError as error:
        if (Path(path) / "generation_config.json").exists():
            raise ValueError(
                f"model.path: generation_config.json in {path} cannot be read; download it again, or delete it"
            ) from error
        return []
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
