"""Parses and writes the YAML of configs: scalars of YAML 1.2, plain data of limited size, without duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

import yaml

from megagrpo.config.basics.problems import ConfigError

MOST_NODES = 100_000  # keys and values of a file; each alias counts as the values it refers to
DEEPEST = 50  # levels of lists and mappings
MOST_DIGITS = 100  # of an integer; pydantic rejects values that are too large for a key

# The scalars of YAML 1.2. PyYAML implements YAML 1.1, where 1e-5 is a string, off is false and 1:30 is ninety.
_SCALARS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
]


class Loader(yaml.SafeLoader):
    """A YAML loader for the scalars above; `_check` rejects everything else."""

    yaml_implicit_resolvers = {}


class TextLoader(Loader):
    """A YAML loader whose plain scalars are texts."""

    yaml_implicit_resolvers = {}


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text if YAML 1.1 or 1.2 reads it as another type, such as off, 1e3 and 12:30."""


def _text_node(dumper: Dumper, text: str) -> yaml.ScalarNode:
    """Return the node of a text. Line breaks other than \\n are only kept in double quotes."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAKS.search(text) else None)


_BREAKS = re.compile("[\r\x85\u2028\u2029]")
Dumper.add_representer(str, _text_node)

for _tag, _pattern, _first in _SCALARS:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


_TAGS = {tag: re.compile(pattern) for tag, pattern, _ in _SCALARS}
ODD_TEXT = re.compile("[\0\ud800-\udfff]")


def parse_yaml(text: str, origin: str, texts: bool = False, comments: bool = True) -> Any:
    """Return the values in `text`; with `texts` its plain scalars are texts. Raises ConfigError, with line and key, for
    invalid YAML, for YAML that a config must not contain, and for a comment without `comments`."""
    origin = shortened(origin)
    try:
        if not comments:
            _refuse_comments(text)
        loader = (TextLoader if texts else Loader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, "", {}, ())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        what = getattr(error, "problem", None) or shortened(str(error))
        fix = "; indent with spaces" if "'\\t'" in what else ""
        raise ConfigError(f"{where}: not valid YAML: {what}{fix}") from None
    except RecursionError:
        raise ConfigError(
            f"{origin}: not valid YAML: lists and mappings are nested deeper than {DEEPEST} levels"
        ) from None


def _refuse_comments(text: str) -> None:
    """Raise YAMLError when something between two tokens is a comment, which YAML would drop."""
    if "#" not in text:
        return
    for one, other in pairwise(yaml.scan(text, Loader=Loader)):
        if "#" in text[one.end_mark.index : other.start_mark.index]:
            reason = (
                "the text from # on is a comment, which would be dropped; put the value in quotes, or leave the "
                "comment out"
            )
            raise yaml.scanner.ScannerError(problem=reason, problem_mark=one.end_mark)


def _check(
    node: yaml.Node, key: str, seen: dict[yaml.Node, tuple[int, int]], above: tuple[yaml.Node, ...]
) -> tuple[int, int]:
    """Return (nodes, levels) from the dotted `key` down. Raises YAMLError for data that is not plain or too large."""

    def refuse(problem: str, at: yaml.Node = node) -> NoReturn:
        raise yaml.constructor.ConstructorError(
            problem=f"{key}: {problem}" if key else problem, problem_mark=at.start_mark
        )

    if node in above:
        refuse("the value contains itself; write the values out")
    if node in seen:
        return seen[node]
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, refuse)
        return 1, 0
    if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        refuse(f"the tag {shortened(node.tag)} is not supported; leave it out")
    below = [(f"{key}.{i}" if key else str(i), child) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        names: set[tuple[str, str]] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                refuse("a key must be a scalar, not a list or a mapping", name)
            _check_scalar(name, refuse)
            if (name.tag, name.value) in names and name.tag != "tag:yaml.org,2002:merge":
                refuse(f"duplicate key {shortened(repr(name.value))}; remove one", name)
            names.add((name.tag, name.value))
        below = [(f"{key}.{name.value}" if key else name.value, child) for name, child in node.value]
    sizes = [_check(child, shortened(name), seen, (*above, node)) for name, child in below]
    seen[node] = 1 + sum(nodes for nodes, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
    if seen[node][0] > MOST_NODES:
        refuse(f"the file has more than {MOST_NODES} values, the limit; write fewer into one file")
    if seen[node][1] > DEEPEST:
        refuse(f"lists and mappings are nested deeper than {DEEPEST} levels; write them flat")
    return seen[node]


def _check_scalar(node: yaml.ScalarNode, refuse: Callable[[str], NoReturn]) -> None:
    if node.tag != "tag:yaml.org,2002:str" and not (node.tag in _TAGS and _TAGS[node.tag].fullmatch(node.value)):
        refuse(
            f"{shortened(repr(node.value))} is not a valid value of the tag {shortened(node.tag)}; leave the tag out"
        )
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
        refuse(f"the integer has {len(node.value)} digits; the limit is {MOST_DIGITS}")
    if odd := odd_text(node.value):
        refuse(odd)


def odd_text(text: str) -> str:
    """Return why a config cannot hold `text`, and the fix; empty for text that it can hold."""
    odd = ODD_TEXT.search(text)
    if not odd:
        return ""
    what = "a zero byte" if odd[0] == "\0" else f"a lone surrogate, \\u{ord(odd[0]):x}"
    # a byte of a file name that is not UTF-8
    fix = "rename it in UTF-8" if "\udc80" <= odd[0] <= "\udcff" else "leave it out"
    return f"{shortened(repr(text))} contains {what}, which files and tokenizers reject; {fix}"


def flow_text(value: Any) -> str:
    """Return plain data as YAML on one line, which `parse_yaml` reads back."""
    return (
        yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
        .removesuffix("\n...\n")
        .strip()
    )


def block_text(value: Any) -> str:
    """Return plain data as YAML, a line per value, which `parse_yaml` reads back."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def shortened(text: str, length: int = 200) -> str:
    """Return `text` for a message; if longer than `length`, its beginning and its length."""
    return text if len(text) <= length else f"{text[: length - 50]}... ({len(text)} characters)"
