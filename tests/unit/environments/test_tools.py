"""Tools: the function descriptions for a policy, parsing of tool calls, and the results of the calculator."""

import json
import re
import time
from typing import Any, Literal

import pytest

from megagrpo.environments.calculator import calculator
from megagrpo.environments.episodes.tool_calls import as_message, hermes
from megagrpo.environments.episodes.tool_schema import tool_schema
from tests.unit.for_each import for_each


def plain(query: str, limit: int = 3) -> str:
    """Looks something up.

    Args:
        query: What to look for,
            in words.
        limit: How many results.

    Returns:
        The results.
    """


def rich(
    kind: Literal["a", "b"], path: list[str], weights: dict[str, float], exact: bool | None = None, tag: int | str = "x"
) -> dict:
    """Many types.

    And a second paragraph.

    Args:
        kind: One of two.
        path: Words.
        weights: By name.
        exact: Whether it must fit.
        tag: Either.
    """


def without_arguments() -> str:
    """Tells the time."""


@pytest.mark.parametrize("function", [plain, without_arguments, calculator], ids=lambda f: f.__name__)
def test_schemas_are_those_of_transformers(function):
    from transformers.utils.chat_template_utils import get_json_schema

    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert tool_schema(function) == expected


def test_types_have_their_json_schemas():
    found = tool_schema(rich)["function"]
    assert found["description"] == "Many types.\n\nAnd a second paragraph."
    assert found["parameters"]["required"] == ["kind", "path", "weights"]
    assert found["parameters"]["properties"] == {
        "kind": {"type": "string", "enum": ["a", "b"], "description": "One of two."},
        "path": {"type": "array", "items": {"type": "string"}, "description": "Words."},
        "weights": {"type": "object", "additionalProperties": {"type": "number"}, "description": "By name."},
        "exact": {"type": "boolean", "nullable": True, "description": "Whether it must fit."},
        "tag": {"anyOf": [{"type": "integer"}, {"type": "string"}], "description": "Either."},
    }


def untold(x: int) -> int: ...


def untyped(x) -> int:
    """Adds.

    Args:
        x: A number.
    """


def undescribed(x: int) -> int:
    """Adds."""


def starred(*x: int) -> int:
    """Adds."""


def odd(x: complex) -> int:
    """Adds.

    Args:
        x: A number.
    """


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (untold, "tool `untold` has no docstring"),
        (untyped, "tool `untyped`: argument `x` has no type hint"),
        (undescribed, "tool `undescribed`: argument `x` is not described"),
        (starred, r"tool `starred` takes \*x"),
        (odd, "has no JSON schema"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_does_not_say_what_it_takes_is_refused(function, problem):
    with pytest.raises(ValueError, match=problem):
        tool_schema(function)


def wrapped(*bodies: Any) -> str:
    return "\n".join(
        f"<tool_call>\n{body if isinstance(body, str) else json.dumps(body)}\n</tool_call>" for body in bodies
    )


ADD = {"name": "add", "arguments": {"a": 1}}


@for_each(
    ("text", "content", "calls"),
    [
        ("It is 4.", "It is 4.", []),
        (wrapped(ADD), "", [ADD]),
        (
            "Let me see.\n" + wrapped(ADD, ADD | {"name": "sub"}) + " and so on",
            "Let me see.",
            [ADD, ADD | {"name": "sub"}],
        ),
        ("<tool_call>" + json.dumps(ADD), "", [ADD]),
        (wrapped({"name": "now"}), "", [{"name": "now", "arguments": {}}]),
        (wrapped({"name": "add", "arguments": '{"a": 1}'}), "", [ADD]),
        (wrapped({"name": "add", "parameters": {"a": 1}}), "", [ADD]),
        (wrapped({"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}), "", [ADD]),
        *(
            (wrapped({"name": "now", "arguments": empty}), "", [{"name": "now", "arguments": {}}])
            for empty in ({}, None, "", " ")
        ),
        (
            wrapped(r'{"name": "add", "arguments": {"a": "\u00e9\ud83d\ude00"}}'),
            "",
            [{"name": "add", "arguments": {"a": "é😀"}}],
        ),
        (wrapped(ADD) + "\nand then\n" + wrapped(ADD), "", [ADD, ADD]),
        ("<tool_call>" + json.dumps(ADD) + "\n" + wrapped(ADD), "", [ADD, ADD]),
    ],
)
def test_hermes_calls_are_read(text, content, calls):
    assert hermes(text) == (content, calls)


@for_each(
    "argument",
    [
        *(
            "</tool_call>",
            "<tool_call>",
            "a </tool_call><tool_call> b",
            "</think>",
            "<think>",
            "}}",
            '{"x": {"y": [1, "}"]}}',
            "\\",
            '"',
        ),
        *(
            "\n</tool_call>\n",
            wrapped(ADD),
            "</tool_call>" * 5000,
            "\\" * 5000 + "</tool_call>",
            "é" * 5000,
            "\U0001f600" * 2000,
        ),
    ],
)
def test_an_argument_holds_any_text(argument):
    call = {"name": "write", "arguments": {"path": "a", "content": argument, "more": {"list": [argument, {"x": None}]}}}
    for text in (json.dumps(call), json.dumps(call, ensure_ascii=False), json.dumps(call, indent=2)):
        assert hermes(f"Hm. {wrapped(text, ADD)} so") == ("Hm.", [call, ADD])
        assert hermes(f"<tool_call>{text}") == ("", [call])
    assert hermes(wrapped({"name": "write", "arguments": json.dumps(call["arguments"])})) == ("", [call])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<think>Try {wrapped(ADD)}?</think>It is 4.", None, []),
        (f"<think>Try {wrapped(ADD)}?</think>\n{wrapped(ADD)}", f"<think>Try {wrapped(ADD)}?</think>", [ADD]),
        # the chat template opened the thought
        (f"Try {wrapped(ADD)}?</think>{wrapped(ADD)}", f"Try {wrapped(ADD)}?</think>", [ADD]),
        (f"I write <tool_call>...</think>{wrapped(ADD)}", "I write <tool_call>...</think>", [ADD]),
        (f"<think>Try {wrapped(ADD)}", None, []),
        (f"{wrapped(ADD)}<think>Now {wrapped(ADD)}</think>{wrapped(ADD)}", "", [ADD, ADD]),
    ],
)
def test_calls_in_a_thought_do_not_count(text, content, calls):
    assert hermes(text) == (text if content is None else content, calls)


@for_each(
    "part",
    [
        *(
            "<tool_call>",
            "<tool_call>{",
            '<tool_call>"',
            "<tool_call></tool_call>",
            '<tool_call>{"a": "</tool_call>',
            "<think>",
            "</think>",
        ),
        *(
            "<tool_call></think>",
            "<tool_call>[",
            '<tool_call>{"name": "a"}',
            "\n<tool_call>\n",
            "<tool_call>{}</tool_call> ",
            "<think></think>",
        ),
    ],
)
def test_a_hostile_text_takes_linear_time(part):
    content, calls = hermes(part * 50_000)
    assert all("error" in call or call["name"] == "a" for call in calls) and len(content) <= len(part) * 50_000


@for_each(
    ("body", "problem"),
    [
        ("{'name': 'add'}", "not valid JSON"),
        ("[1]", "has no name"),
        ({"name": 3, "arguments": {}}, "has no name"),
        ({"name": "add", "arguments": [1]}, "arguments of add must be an object"),
        ({"name": "add", "arguments": "{"}, "arguments of add are not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": "x', "not valid JSON: Invalid control character at: line 1 column 38"),
        ('{"name": "add", "arguments": {"a": 1}', r"not valid JSON: Expecting ',' delimiter: line 2 column 1"),
        (
            '{"name": "add", "arguments": {"a": "say "x""}}',
            r"not valid JSON: Expecting ',' delimiter: line 1 column 42",
        ),
        (json.dumps(ADD) + "}", "not valid JSON: </tool_call> must follow the object, not '}"),
        (json.dumps(ADD) + json.dumps(ADD), "not valid JSON: </tool_call> must follow the object"),
        ("9" * 5000, "not valid JSON: Exceeds the limit"),
    ],
)
def test_broken_calls_say_what_is_wrong(body, problem):
    (call, after) = hermes(wrapped(body, ADD))[1]
    assert re.search(problem, call["error"]) and after == ADD
    assert as_message("x", [call]) == {"role": "assistant", "content": "x"}


@for_each(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(12 + 30) / 4", "10.5"),
        ("6 / 3", "2"),
        ("1 / 3", "0.333333333333"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2^10", "1024"),
        ("1,234,567 + 1", "1234568"),
        ("max(1, 2, 3) + sqrt(16) + abs(-2)", "9"),
        ("round(2.6) + floor(2.6) + ceil(2.1)", "8"),
        ("3 \N{MULTIPLICATION SIGN} 4 \N{DIVISION SIGN} 2", "6"),
        ("pi", "3.14159265359"),
        ("round(2.567, 1)", "2.6"),
        ("round(7, -10 ** 9)", "0"),
        ("99 ** 99", str(99**99)),
    ],
)
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@for_each(
    "expression",
    [
        *(
            "__import__('os').system('true')",
            "open('/etc/passwd')",
            "(1).__class__",
            "[1, 2]",
            "1 if 2 else 3",
            "lambda: 1",
            "x",
            "'a' * 9",
        ),
        *(
            "10 ** 10 ** 10",
            "9 ** 9 ** 9 ** 9",
            "2 ** 100000",
            "1e308 * 10",
            "(-8) ** 0.5",
            "1 / 0",
            "",
            "1 +",
            "True + 1",
            "1j",
        ),
        *(
            "(" * 300 + "1" + ")" * 300,
            "+" * 499,
            "9" * 501,
            "sqrt(-1)",
            "max()",
            "\x00",
            "2 ** 4095 * 2 ** 4095",
            "abs(1, 2)",
        ),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic_and_what_never_ends(expression):
    begun = time.monotonic()
    with pytest.raises((ValueError, ArithmeticError, TypeError)):
        calculator(expression)
    assert time.monotonic() - begun < 0.5
