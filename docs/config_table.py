"""Writes docs/config/SECTION.md, the index of all keys in docs/config.md, and configs/schema.json: python
docs/config_table.py"""

from __future__ import annotations

import re
from pathlib import Path

from megagrpo.config import RunConfig, render_help
from megagrpo.config.json_schema import schema_text

PAGE = Path(__file__).with_name("config.md")
FOLDER = Path(__file__).with_name("config")
SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"
BEGIN, END = "<!-- the index of keys begins -->", "<!-- the index of keys ends -->"
_KEY = re.compile(r"  (\S+)  \((.*), (?:default (.*)|(required))\)")
_GROUP = re.compile(r"(\w+(?:\.\w+)+):  (.*)")  # keys below one key


def section_page(section: str) -> str:
    """`megagrpo keys SECTION` as a page with a heading per key, so that every key has an anchor and is found by its
    name."""
    lines = [
        f"# Keys of `{section}`",
        "",
        "[All sections](../config.md#every-key). `python docs/config_table.py` writes this page.",
    ]
    for line in render_help(section).splitlines():
        if match := _KEY.fullmatch(line):
            key, type_name, default, required = match.groups()
            shown = required or f"default {default if default == 'empty' else f'`{default}`'}"
            lines += ["", f"## `{key}`", "", f"{type_name.replace('|', 'or')}, {shown}", ""]
        elif group := _GROUP.fullmatch(line):
            lines += ["", f"## `{group[1]}`", "", group[2]]
        elif line.startswith("      "):
            lines.append(re.sub(r"docs/(\w+\.md)", r"[\1](../\1)", line.strip()))
    return "\n".join(lines) + "\n"


def index() -> str:
    """The names of all keys by section, each a link to its heading."""
    blocks = []
    for section in RunConfig.model_fields:
        keys = [match[1] for line in render_help(section).splitlines() if (match := _KEY.fullmatch(line))]
        names = (f"[`{key}`](config/{section}.md#{re.sub(r'[^\w]', '', key.lower())})" for key in keys)
        blocks.append(f"### `{section}`\n\n[{len(keys)} keys](config/{section}.md):\n" + ",\n".join(names))
    return "\n\n".join(blocks)


def with_index(page: str) -> str:
    """The page with the text between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{index()}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """The text of every generated page."""
    return {FOLDER / f"{section}.md": section_page(section) for section in RunConfig.model_fields} | {
        PAGE: with_index(PAGE.read_text())
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    SCHEMA.write_text(schema_text(), encoding="utf-8")
