"""Writes the tables of environment variables into docs/environment.md: python docs/environment_table.py"""

from __future__ import annotations

from pathlib import Path

from megagrpo.platform.process.environment import IGNORED, PASSED, REFUSED, REMOVED, TABLE, Row

PAGE = Path(__file__).with_name("environment.md")
BEGIN, END = "<!-- the table of variables begins -->", "<!-- the table of variables ends -->"
MEANING = {
    REFUSED: "The command names the variable and ends before a server or a rank starts.",
    IGNORED: "The command removes the variable, says so, and goes on as without it.",
    REMOVED: "The command and its ranks read the variable, servers do not get it.",
    PASSED: "The command, its ranks and its servers read the variable.",
}


def is_shown(row: Row) -> bool:
    """Whether a row says more than that any variable with this prefix is passed on."""
    prefixes = all(name.endswith("*") for name in row.names.split())
    return row.fate != PASSED or row.reader == "megagrpo" or row.harmful is not None or not prefixes


def with_table(page: str) -> str:
    """The page with the text between its two marks replaced by a table for each fate."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines: list[str] = []
    for fate, meaning in MEANING.items():
        lines += ["", f"### {fate[0].upper()}{fate[1:]}", "", meaning, "", "| variables | effect |", "|---|---|"]
        for row in (row for row in TABLE if row.fate == fate and is_shown(row)):
            names = " ".join(f"`{name}`" for name in row.names.split())
            value = "" if row.harmful is None else f"`{row.harmful}`: " if row.harmful else "any value: "
            lines.append(f"| {names} | {value}{row.effect} |")
    return "\n".join([f"{before}{BEGIN}", *lines, f"\n{END}{after}"])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
