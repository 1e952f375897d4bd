"""Tries constraints and lists of tools as a server of this environment does with a request.

The process of `data/tokens/request_trial.py`. Each line of standard input is a request. Each line of standard output is
[the reason for its refusal or null, whether this process is used up]. It limits its own memory, and its CPU time by
request. Without vLLM it tries constraints with xgrammar alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megagrpo.data.tokens.schema_features import endless_rule, overlapping, unread
from megagrpo.platform.process.cleanup.parent_death import end_with_parent

REASON_CHARACTERS = 600
_WHERE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+: ?")  # what xgrammar writes before a message
NO_XGRAMMAR = "the trainer computes the allowed tokens with xgrammar: {}; install the xgrammar of vLLM's environment in"
NO_XGRAMMAR += " the trainer's, or leave the key out"
# vLLM's packages whose own code imports what no verdict on a constraint needs, for one second and a half
SKIPPED = ("vllm", "vllm.v1", "vllm.v1.structured_output")


def main() -> None:
    """Answer requests until standard input ends. With a second argument vLLM's packages are imported whole, as they are
    where the rest alone cannot be imported."""
    end_with_parent(os.getppid())
    limits, whole = json.loads(sys.argv[1]), len(sys.argv) > 2
    stdout = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        trial = Trial(() if whole else SKIPPED)
    except Exception:
        if whole:
            raise
        os.dup2(stdout, 1)
        os.execv(sys.executable, [sys.executable, *sys.argv, "whole"])
    answers = os.fdopen(stdout, "w")

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer(trial.vllm_version)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + limits["bytes"], resource.RLIM_INFINITY))
    for line in sys.stdin:
        seconds = int(time.process_time()) + limits["seconds"] + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            reason = trial.refusal(json.loads(line))
        except MemoryError:
            reason = "takes too much memory; shorten it"
        # vLLM gives up on a regular expression, but its thread goes on
        answer([reason and one_line(reason), "timed out" in str(reason)])


def one_line(text: object) -> str:
    """Return the beginning of a message on one line, without the places in xgrammar's source."""
    line = " ".join(_WHERE.sub("", str(text)).split())
    return line if len(line) <= REASON_CHARACTERS else f"{line[:REASON_CHARACTERS]}..."


def _captured(action: Callable[[], object]) -> list[str]:
    """Run `action` and return the warnings that xgrammar writes to standard error meanwhile."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            action()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    return list(dict.fromkeys(_WHERE.sub("", line).removeprefix("Warning: ") for line in lines if "Warning: " in line))


def _without_code(name: str) -> Any:
    """Return the package `name`, whose modules can be imported although its own code has not run."""
    if (spec := importlib.util.find_spec(name)) is None:
        raise ImportError(name)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    return package


class Trial:
    """Tries requests with vLLM's own functions, in an environment without vLLM with xgrammar's. The code of the
    packages `skipped` does not run."""

    def __init__(self, skipped: Sequence[str] = ()) -> None:
        self.xgrammar: Any = None
        self.vllm_version: str | None = None
        self.missing = ""
        if skipped:
            importlib.metadata.packages_distributions = dict  # transformers reads every package's files for it
        try:
            import xgrammar

            self.xgrammar = xgrammar
            pieces = [bytes([i]) for i in range(256)] + [b"</s>"]
            size = len(pieces)
            info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[size - 1])
            self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        except ImportError as error:
            self.missing = str(error)
            return
        try:
            self._import_vllm(skipped)
        except ImportError:
            if skipped and importlib.util.find_spec("vllm"):
                raise

    def _import_vllm(self, skipped: Sequence[str]) -> None:
        self._skipped = [_without_code(name) for name in skipped]
        from vllm.config import StructuredOutputsConfig
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
        from vllm.v1.structured_output.utils import grammar_is_likely_lark
        from vllm.version import __version__

        self.vllm_version = __version__
        self._unsupported, self._is_lark = has_xgrammar_unsupported_json_features, grammar_is_likely_lark
        self._params, self._constraint = SamplingParams, StructuredOutputsParams
        self._backend = StructuredOutputsConfig(backend="xgrammar")
        size = 2**31  # the caller compares token ids with the vocabulary
        self._model = SimpleNamespace(max_logprobs=20, is_diffusion=False, get_vocab_size=lambda: size)

    def refusal(self, request: dict[str, Any]) -> str | None:
        """Return the reason for a refusal with its fix, None for a valid request."""
        if "parser" in request:
            return self._of_tools(**request)
        if self.xgrammar is None:
            return NO_XGRAMMAR.format(self.missing)
        ((kind, text),) = request.items()
        schema: Any = {}
        if kind == "json":
            try:
                schema = json.loads(text)
            except RecursionError:
                return "the json is nested too deeply; flatten it"
            if (found := unread(schema)) is not None:
                return f"json: {found}"
        try:
            warnings = _captured(lambda: self._accept(kind, text))
        except MemoryError:
            raise
        except Exception as error:
            return self._reason(kind, schema, error)
        for warning in warnings:
            pointer = overlapping(schema) if "oneOf" in warning else ""
            if pointer is not None:
                where = f"`oneOf` at {pointer}: write anyOf: " if pointer else ""
                return f"xgrammar does not enforce the {kind}: {where}{warning}; correct it"
        if (rule := endless_rule(self._parse(kind, text).serialize_json())) is not None:
            return f"the {kind} can never end after rule `{rule}`, so responses reach their limit; give it a way to end"
        return None

    def _accept(self, kind: str, text: str) -> None:
        """Do what a server does with a request, and what trainer and server do at its first token."""
        if self.vllm_version is not None:
            params = self._params(structured_outputs=self._constraint(**{kind: text}))
            params.verify(self._model, None, self._backend, object())
            if kind == "grammar" and self._is_lark(text):
                raise ValueError("vLLM reads it as a Lark grammar; write rules as `root ::= ...`, and not in comments")
        compiler = self.compiler
        verbs: dict[str, Callable[[str], Any]] = {
            "json": compiler.compile_json_schema,
            "regex": compiler.compile_regex,
            "grammar": compiler.compile_grammar,
        }
        verbs[kind](text)

    def _parse(self, kind: str, text: str) -> Any:
        grammar = self.xgrammar.Grammar
        return {"json": grammar.from_json_schema, "regex": grammar.from_regex, "grammar": grammar.from_ebnf}[kind](text)

    def _reason(self, kind: str, schema: Any, error: Exception) -> str:
        if "bad_alloc" in str(error):
            raise MemoryError from None
        if kind == "json" and self.vllm_version is not None and self._unsupported(schema):
            part, names = self._smallest(schema)
            named = " and ".join(f"`{name}`" for name in names)
            return (
                f"json: vLLM refuses {named} in {json.dumps(part):.200}: not supported by xgrammar; remove {names[-1]}"
            )
        return f"xgrammar cannot compile the {kind}: {one_line(error.__cause__ or error)}; correct it"

    def _smallest(self, schema: Any) -> tuple[Any, list[str]]:
        """Return the innermost mapping that vLLM refuses, and the keys without which it does not."""
        inside = list(schema.values()) if isinstance(schema, dict) else list(schema)
        for part in inside:
            if isinstance(part, list) or (isinstance(part, dict) and self._unsupported(part)):
                found = self._smallest(part)
                if found[1]:
                    return found
        if not isinstance(schema, dict):
            return schema, []
        causes = [key for key in schema if not self._unsupported({k: v for k, v in schema.items() if k != key})]
        return schema, [key for key in causes if key != "type"] or causes

    def _of_tools(self, parser: str, tools: list[dict[str, Any]], tokenizer: str) -> str | None:
        """Try a request for tool calls, and the parser that reads them."""
        if self.vllm_version is None:
            return None
        for package in self._skipped:
            package.__loader__.exec_module(package)
        self._skipped = []
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        message = {"role": "user", "content": ""}
        try:
            chat = ChatCompletionRequest(model="policy", messages=[message], tools=tools or None, tool_choice="auto")
            ToolParserManager.get_tool_parser(parser)(get_tokenizer(tokenizer), chat.tools)
        except Exception as error:
            return f"vLLM refuses parser {parser} with these tools and this tokenizer: {error}"
        return None


if __name__ == "__main__":
    main()
