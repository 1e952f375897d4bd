"""Writes the table of environment variables into docs/environment.md: python docs/environment_table.py"""

from __future__ import annotations

from pathlib import Path

from megagrpo.platform.process.environment import TABLE

PAGE = Path(__file__).with_name("environment.md")
BEGIN, END = "<!-- the table of variables begins -->", "<!-- the table of variables ends -->"


def with_table(page: str) -> str:
    """The page with the text between its two marks replaced by the table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| variables | read by | what happens | effect |", "|---|---|---|---|"]
    for row in TABLE:
        names = " ".join(f"`{name}`" for name in row.names.split())
        value = "" if row.harmful is None else f"`{row.harmful}`: " if row.harmful else "any value: "
        lines.append(f"| {names} | {row.reader} | {row.fate} | {value}{row.effect} |")
    return "\n".join([f"{before}{BEGIN}\n", *lines, f"\n{END}{after}"])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
