"""Writes the table of all keys into docs/config.md, and configs/schema.json: python docs/config_table.py"""

from __future__ import annotations

import re
from pathlib import Path

from megagrpo.config import render_help
from megagrpo.config.schema import schema_text

PAGE = Path(__file__).with_name("config.md")
SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"
BEGIN, END = "<!-- the table of keys begins -->", "<!-- the table of keys ends -->"
_KEY = re.compile(r"  (\S+)  \((.*), (?:default (.*)|(required))\)")


def table(help_text: str) -> str:
    """`megagrpo keys` as one Markdown table per section of the config."""
    lines: list[str] = []
    section = ""
    for line in help_text.splitlines():
        if match := _KEY.fullmatch(line):
            key, type_name, default, required = match.groups()
            if key.split(".")[0] != section:
                section = key.split(".")[0]
                lines += ["", f"### `{section}`", "", "| key | type | default | meaning |", "|---|---|---|---|"]
            shown = required or (default if default == "empty" else f"`{_cell(default)}`")
            lines.append(f"| `{key}` | {_cell(type_name)} | {shown} | |")
        elif line.startswith("      "):
            lines[-1] = lines[-1].removesuffix("|").rstrip() + f" {_cell(line.strip())} |"
    return "\n".join(lines).strip()


def with_table(page: str) -> str:
    """The page with the text between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(render_help())}\n\n{END}{after}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    SCHEMA.write_text(schema_text(), encoding="utf-8")
