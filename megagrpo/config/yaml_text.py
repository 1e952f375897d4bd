"""YAML as a config has it: the scalars of YAML 1.2, plain data of a bounded size, and no key twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import yaml

from megagrpo.config.problems import ConfigError

MOST_NODES = 100_000  # keys and values of a file, each alias counted as what it stands for
DEEPEST = 50  # levels of lists and mappings
MOST_DIGITS = 100  # of a whole number; pydantic says what is too large for a key

# The scalars of YAML 1.2. PyYAML's own are those of 1.1, where 1e-5 is a string, off is false and 1:30 is ninety.
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
    """Reads the scalars above, and nothing that a config has no use for: see `_check`."""

    yaml_implicit_resolvers = {}


class Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}


for _tag, _pattern, _first in _SCALARS:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


_TAGS = {tag: re.compile(pattern) for tag, pattern, _ in _SCALARS}
ODD_TEXT = re.compile("[\0\ud800-\udfff]")


def parse_yaml(text: str, origin: str) -> Any:
    """The values in `text`. ConfigError, with the line and the key, for what is no YAML, and for YAML that a config cannot hold."""
    origin = shortened(origin)
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, "", {}, ())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or shortened(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: not valid YAML: lists and mappings are nested deeper than {DEEPEST} levels") from None


def _check(node: yaml.Node, key: str, seen: dict[yaml.Node, tuple[int, int]], above: tuple[yaml.Node, ...]) -> tuple[int, int]:
    """(nodes, levels) at and below a node at the dotted `key`. A YAMLError for what is no plain data, or is too much."""

    def refuse(problem: str, at: yaml.Node = node) -> NoReturn:
        raise yaml.constructor.ConstructorError(problem=f"{key}: {problem}" if key else problem, problem_mark=at.start_mark)

    if node in above:
        refuse("it holds itself; write the values out")
    if node in seen:
        return seen[node]
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, refuse)
        return 1, 0
    if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        refuse(f"the tag {shortened(node.tag)} is not read here; leave it out")
    below = [(f"{key}.{i}" if key else str(i), child) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        names: set[tuple[str, str]] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                refuse("a key must be a word, not a list or a mapping", name)
            _check_scalar(name, refuse)
            if (name.tag, name.value) in names and name.tag != "tag:yaml.org,2002:merge":
                refuse(f"key {shortened(repr(name.value))} stands twice", name)
            names.add((name.tag, name.value))
        below = [(f"{key}.{name.value}" if key else name.value, child) for name, child in node.value]
    sizes = [_check(child, shortened(name), seen, (*above, node)) for name, child in below]
    seen[node] = 1 + sum(nodes for nodes, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
    if seen[node][0] > MOST_NODES:
        refuse(f"more than {MOST_NODES} values; write less into one file")
    if seen[node][1] > DEEPEST:
        refuse(f"lists and mappings are nested deeper than {DEEPEST} levels; write them flat")
    return seen[node]


def _check_scalar(node: yaml.ScalarNode, refuse: Callable[[str], NoReturn]) -> None:
    if node.tag != "tag:yaml.org,2002:str" and not (node.tag in _TAGS and _TAGS[node.tag].fullmatch(node.value)):
        refuse(f"{shortened(repr(node.value))} is no value of the tag {shortened(node.tag)}; leave the tag out")
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
        refuse(f"a whole number of {len(node.value)} digits; write one of {MOST_DIGITS} at most")
    if odd := ODD_TEXT.search(node.value):
        what = "a zero byte" if odd[0] == "\0" else f"half of a character, \\u{ord(odd[0]):x}"
        refuse(f"{shortened(repr(node.value))} holds {what}, which no file and no tokenizer takes; leave it out")


def shortened(text: str, length: int = 200) -> str:
    """`text` for a message: its beginning, and how long it is, when it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length - 50]}... ({len(text)} characters)"
