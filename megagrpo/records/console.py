"""Prints a run's lines: the metrics of each step and evaluation, and at intervals a prompt with two of its responses.

Lines are at most 100 columns, or the width of a narrower terminal. In a pipe a message stays on one line, so that its
text can be searched; on a terminal it is wrapped at words.
"""

from __future__ import annotations

import math

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from megagrpo.config import RunConfig, evaluation_sets
from megagrpo.platform.process.terminal import WIDTH, one_line, printable, quiets, wrapped, write_output
from megagrpo.records.rows.completions import Rows, best_and_worst
from megagrpo.records.terminal_screen import lines_console
from megagrpo.row_image import content_text

# (label, metric, format). A metric that a step does not report is omitted.
STEP_COLUMNS = [
    ("reward", "reward", "{:6.3f}"),
    ("std", "reward_std", "{:5.3f}"),
    ("kl", "kl", "{:.4f}"),
    ("length", "completions/mean_length", "{:6.1f}"),
    ("cut", "completions/clipped_ratio", "{:4.0%}"),
    ("entropy", "entropy", "{:5.3f}"),
    ("grad", "grad_norm", "{:6.2f}"),
    ("", "time/step", "{:5.1f}s"),
    ("clip", "clip_ratio/region_mean", "{:5.1%}"),
    ("tok/s", "tokens_per_second", "{:5.0f}"),
    ("mfu", "mfu", "{:5.1%}"),
    ("mem", "memory_gb", "{:5.1f}G"),
    ("age", "staleness/mean", "{:4.2f}"),
    ("idle", "idle/trainer", "{:4.0%}"),
]
EVALUATION_COLUMNS = [("reward", "reward", "{:6.3f}"), ("pass@1", "pass@1", "{:4.0%}")]
EVALUATION_COLUMNS += [c for c in STEP_COLUMNS if c[0] in ("length", "cut")]
ROW_COLUMNS = [  # of a run on the responses of rows, before the others
    ("loss", "loss", "{:7.4f}"),
    ("accuracy", "rewards/accuracy", "{:4.0%}"),
    ("margin", "rewards/margin", "{:7.4f}"),
]
# Suffixes of counters that are shown when they are not 0.
ALARMS = ("/timeouts", "/exceptions", "/unscorable", "/failures", "/skipped_steps", "/alarms")
INDENT = 14  # indent of continuation lines, in columns
SHOWN_TASKS = 12  # rewards of tasks of a step
SHOWN_PHASES = ["generate", "reward", "logprobs", "train", "sync"]


class ConsoleSink:
    """Prints to standard output: panels in colour on a terminal, plain lines elsewhere. `run.log_level` hides lines."""

    def __init__(self, config: RunConfig, console: Console | None = None):
        self._console = console or lines_console()
        self._level = config.run.log_level
        self._max_steps = config.run.num_steps
        self._every = config.run.log_completions_steps
        self._tasks = [task.name for task in config.tasks]
        self._held_out = list(evaluation_sets(config)) or [""]
        self._hidden = {"kl"} if config.algorithm.beta == 0 else set()
        self._hidden |= set() if config.algorithm.loss.generates else {"cut"}
        self._first = [] if config.algorithm.loss.generates else ROW_COLUMNS
        if not config.rollout.max_staleness:
            self._hidden.add("idle")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if quiets(self._level, "info"):
            return
        width = len(str(self._max_steps))
        first = Text(f"step {step:{width}d}/{self._max_steps}", style="bold")
        self._print_cells([first, *self._cells([*self._first, *STEP_COLUMNS], metrics), *_phases(metrics)])
        rewards = {name: value for name in self._tasks if (value := metrics.get(f"tasks/{name}/reward")) is not None}
        if rewards:
            of_tasks = [Text(f"  {name} {value:.3f}") for name, value in list(rewards.items())[:SHOWN_TASKS]]
            more = [Text(f"  and {len(rewards) - SHOWN_TASKS} more")] if len(rewards) > SHOWN_TASKS else []
            self._print_cells([Text("reward of".rjust(INDENT), style="dim"), *of_tasks, *more])

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        columns = [*self._first, *EVALUATION_COLUMNS]
        for held_out in [] if quiets(self._level, "info") else self._held_out:
            first = Text(f"evaluation after step {step}{f' of {held_out}' if held_out else ''}", style="bold cyan")
            self._print_cells([first, *self._cells(columns, self._metrics_of(held_out, metrics))])

    def _metrics_of(self, held_out: str, metrics: dict[str, float]) -> dict[str, float]:
        """Return a held-out set's metrics without its name as prefix. The set "" has the metrics without a name."""
        split = [(name.removeprefix("eval/").partition("/"), value) for name, value in metrics.items()]
        if held_out:
            return {rest: value for (first, _, rest), value in split if first == held_out}
        return {first + slash + rest: value for (first, slash, rest), value in split if first not in self._held_out}

    def completions(self, step: int, rows: Rows) -> None:
        if not rows or self._every == 0 or step % self._every or quiets(self._level, "info"):
            return
        shown = best_and_worst(rows)
        prompt = shown[0]["prompt"]
        question = prompt if isinstance(prompt, str) else content_text(prompt[-1]["content"])
        blocks = [Text.assemble(("prompt    ", "dim"), _short(question))]
        for row in shown:
            advantage = row["advantage"]
            rewards = ", ".join(f"{name} {_number(value)}" for name, value in row["rewards"].items())
            score = f"reward {_number(row['reward'])} ({rewards})  advantage {_number(advantage, '{:+.2f}')}"
            style = "green" if (advantage or 0) > 0 else "red" if (advantage or 0) < 0 else ""
            blocks.append(
                Text.assemble(("response  ", "dim"), _short(row["completion"]), ("  -> ", "dim"), (score, style))
            )
        if self._console.is_terminal:
            panel = Panel(
                Group(*blocks), title=f"step {step}", title_align="left", border_style="dim", width=self._width
            )
            self._console.print(panel)
        else:
            for block in blocks:
                first, *rest = block.wrap(self._console, self._width - INDENT, overflow="fold")
                self._print(Text("    ").append(first))
                for line in rest:
                    self._print(Text(" " * INDENT).append(line))

    def message(self, text: str) -> None:
        is_warning = text.startswith("warning:")
        if quiets(self._level, "warning" if is_warning else "info"):
            return
        text = printable(text)
        for line in wrapped(text, self._width) if self._console.is_terminal else [text]:
            self._print(Text(line, style="yellow" if is_warning else ""))

    def close(self, failed: bool = False) -> None:
        # after an error the rest is discarded, so the run ends with its own exit code
        write_output("", self._console.file)

    @property
    def _width(self) -> int:
        """Columns per line."""
        return min(self._console.width, WIDTH) if self._console.is_terminal else WIDTH

    def _cells(self, columns: list[tuple[str, str, str]], metrics: dict[str, float]) -> list[Text]:
        """Return one text per reported metric of `columns`, then one per failure counter that is not 0."""
        shown = [column for column in columns if column[1] in metrics and column[0] not in self._hidden]
        cells = [
            Text.assemble(
                (f"  {label} " if label else "  ", "dim"),
                (_cell(form, metrics[name]), "green" if name == "reward" else ""),
            )
            for label, name, form in shown
        ]
        return cells + [
            Text(f"  {name} {value:g}", style="red")
            for name, value in metrics.items()
            if name.endswith(ALARMS) and value
        ]

    def _print_cells(self, cells: list[Text]) -> None:
        """Print cells side by side, continued on indented lines. A cell longer than a line is cut into parts."""
        line = cells[0]
        for cell in cells[1:]:
            if len(line) + len(cell) > self._width:
                self._print(line)
                line, cell = Text(" " * INDENT), cell[len(cell.plain) - len(cell.plain.lstrip()) :]
            while len(line) + len(cell) > self._width:
                part = self._width - len(line)
                self._print(line + cell[:part])
                line, cell = Text(" " * INDENT), cell[part:]
            line = line + cell
        self._print(line)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)
        self._console.file.flush()


def _cell(form: str, value: float) -> str:
    """Return the formatted value; a number with more than 12 characters in scientific notation."""
    text = form.format(value)
    return text if len(text) <= 12 else f"{value:.3g}"


def _phases(metrics: dict[str, float]) -> list[Text]:
    """Return `  generate 6.1`, ` + train 5.2`, ...: seconds of each phase; phases below 50 ms are omitted."""
    parts = [(phase, metrics.get(f"time/{phase}", 0.0)) for phase in SHOWN_PHASES]
    named = [f"{phase} {seconds:.1f}" for phase, seconds in parts if seconds >= 0.05]
    return [Text(f"{'  ' if i == 0 else ' + '}{text}", style="dim") for i, text in enumerate(named)]


def _short(text: str, limit: int = 600) -> str:
    """Return the text on one line; above `limit` characters its middle is omitted."""
    line = one_line(text)
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 2 :]}"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None or not math.isfinite(value) else _cell(form, value)
