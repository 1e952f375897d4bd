"""Refuses or skips rows that a run cannot use (`data.bad_rows`), and counts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BadRows:
    """The bad rows of one data set: lines that are no rows, and rows whose prompt, images or settings are invalid.

    `skips` is `data.bad_rows: skip`; `first` is what is wrong with the first one.
    """

    skips: bool = False
    count: int = 0
    first: str = ""

    def add(self, problem: Exception, where: str = "") -> None:
        """Count a bad row; `where` names it. Raises `problem` if bad rows are refused."""
        if not self.skips:
            raise problem
        self.count += 1
        said = str(problem)
        self.first = self.first or (said if where in said else f"{where}: {said}")

    def warnings(self, key: str, total: int) -> list[str]:
        """Return a sentence with the count if rows were skipped. `total` counts bad rows too."""
        if not self.count:
            return []
        return [f"{key}: {self.count} of {total} rows are bad and skipped (data.bad_rows); the first: {self.first}"]
