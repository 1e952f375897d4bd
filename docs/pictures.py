"""Draws docs/images: python docs/pictures.py [RUN [TALKS]]. RUN is the folder of a finished quickstart, TALKS the
folder of the example `agent`. `-` instead of a folder leaves its pictures as they are. Without folders only the layout
is drawn.

The pictures of a report need its report.html, as `megagrpo report` writes it, and Debian's chromium with its driver.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

IMAGES = Path(__file__).with_name("images")
# Colours follow the reader's light or dark scheme, also where the picture is an <img>.
STYLE = """
text { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
.small { font-size: 12px; fill: #57606a; }
.strong { font-weight: 600; }
.axis { stroke: #8c959f; fill: none; }
.grid { stroke: #d0d7de; stroke-width: 0.5; }
.one { stroke: #4051b5; fill: none; stroke-width: 2.5; }
.dot { fill: #4051b5; }
.two { stroke: #d1242f; fill: none; stroke-width: 2; }
.ring { stroke: #d1242f; fill: #ffffff; stroke-width: 2; }
.frame { stroke: #8c959f; fill: none; stroke-dasharray: 5 4; }
.a { fill: #dbe1ff; stroke: #4051b5; }
.b { fill: #ffe3d9; stroke: #bc4c00; }
.server { fill: #d9f2e0; stroke: #1a7f37; }
.arrow { stroke: #57606a; fill: none; stroke-width: 1.5; marker-end: url(#tip); }
.both { stroke: #57606a; fill: none; stroke-width: 1.5; marker-start: url(#tip); marker-end: url(#tip); }
#tip path { fill: #57606a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .grid { stroke: #3d444d; }
  .one { stroke: #8ea0ff; }
  .dot { fill: #8ea0ff; }
  .two { stroke: #ff7b72; }
  .ring { stroke: #ff7b72; fill: #0d1117; }
  .a { fill: #1f2a5c; }
  .b { fill: #4a2413; }
  .server { fill: #12361f; }
  .arrow, .both { stroke: #9198a1; }
  #tip path { fill: #9198a1; }
}
"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
)


class Picture:
    """An SVG of `width` x `height`; `title` describes it for readers who do not see it."""

    def __init__(self, width: int, height: int, title: str):
        defined = f'<defs>{TIP}<path d="M0 0L8 4L0 8z"/></marker></defs>'
        self._parts = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", defined]
        self._size = (width, height)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>')

    def line(self, points: list[tuple[float, float]], kind: str) -> None:
        joined = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{joined}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 3.5) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"/>')

    def write(self, path: Path) -> None:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">'
        )
        path.write_text("\n".join([head, *self._parts, "</svg>"]) + "\n")


def curve(rows: list[dict[str, float]]) -> Picture:
    """The mean reward of each step, and the accuracy on held-out questions before and after."""
    rewards = [(int(row["step"]), row["reward"]) for row in rows if "reward" in row]
    accuracy = [(int(row["step"]), row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
    last = max(step for step, _ in rewards)
    picture = Picture(720, 300, f"Quickstart: reward of {last} steps, and accuracy on held-out sums")
    left, right, top, bottom = 60, 690, 40, 250

    def at(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * value

    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        picture.line([at(0, value), at(last, value)], "grid")
        picture.text(left - 10, at(0, value)[1] + 4, f"{value:g}", "small", "end")
    for step in range(last + 1):
        picture.text(at(step, 0)[0], bottom + 20, str(step), "small")
    picture.line([at(step, value) for step, value in rewards], "one")
    for step, value in rewards:
        picture.dot(*at(step, value), "dot")
    for step, value in accuracy:
        picture.dot(*at(step, value), "ring", 6)
        picture.text(
            at(step, value)[0], at(step, value)[1] - 14, f"{value:.0%}", "strong", "start" if step == 0 else "end"
        )
    picture.text((left + right) / 2, bottom + 42, "step", "small")
    picture.dot(left + 8, 18, "dot")
    picture.text(left + 20, 23, "mean reward of a step's 64 responses", "", "start")
    picture.dot(left + 310, 18, "ring", 6)
    picture.text(left + 324, 23, "accuracy on held-out sums, greedy", "", "start")
    return picture


def layout() -> Picture:
    """Eight ranks that share a model, tp 2 x pp 2 x dp 2, and the loop with the vLLM servers."""
    picture = Picture(760, 430, "Eight ranks, tp 2 x pp 2 x dp 2, and two vLLM servers")
    for replica, left in enumerate((30, 410)):
        picture.box(left, 44, 320, 236, "frame")
        picture.text(left + 160, 32, f"replica {replica}: half of the responses", "strong")
        for stage, top in enumerate((64, 184)):
            layers = "embedding, layers 1 to 16" if stage == 0 else "layers 17 to 32, LM head"
            for half in range(2):
                x = left + 14 + half * 150
                picture.box(x, top, 142, 60, "ab"[stage])
                picture.text(x + 71, top + 26, f"rank {4 * stage + 2 * replica + half}", "strong")
                picture.text(x + 71, top + 46, f"matrices, {'1st' if half == 0 else '2nd'} half", "small")
            picture.text(left + 160, top + 76, f"stage {stage}: {layers}", "small")
        picture.line([(left + 302, 130), (left + 302, 180)], "both")
        picture.text(left + 294, 166, "activations", "small", "end")
    picture.line([(354, 94), (406, 94)], "both")
    picture.line([(354, 214), (406, 214)], "both")
    picture.text(380, 84, "grads", "small")
    picture.text(380, 204, "grads", "small")
    for server, left in enumerate((100, 480)):
        picture.box(left, 352, 180, 56, "server")
        picture.text(left + 90, 376, f"vLLM server {server}", "strong")
        picture.text(left + 90, 396, "any tp of its own", "small")
        picture.line([(left + 60, 284), (left + 60, 348)], "arrow")
        picture.line([(left + 120, 348), (left + 120, 284)], "arrow")
    picture.text(380, 312, "weights, shard to shard", "small")
    picture.text(380, 332, "responses with log-probs", "small")
    return picture


def report(page: Path) -> None:
    """Take screenshots of a report: its first sections, and the responses of step 2 with coloured tokens."""
    with browser(page, 1553) as driver:
        driver.save_screenshot(IMAGES / "report.png")
        for click in ("[aria-label='previous recorded step']",) * 6 + ("[data-value=surprise]",):
            driver.execute_script("document.querySelector(arguments[0]).click()", click)
        driver.execute_script(
            "document.querySelector('.toolbar').remove(); scrollTo(0, document.querySelector('#responses').offsetTop)"
        )
        driver.set_window_size(1360, 1243)
        time.sleep(1)
        driver.save_screenshot(IMAGES / "report-responses.png")


# Leave the responses with the most and the fewest turns of the group in which these numbers differ most.
CONVERSATION = """
document.querySelector('.toolbar').remove();
const turns = (node) => node.querySelectorAll('.own').length;
const inOrder = (group) => [...group.querySelectorAll('tbody tr')].sort((a, b) => turns(b) - turns(a));
const range = (group) => { const rows = inOrder(group); return turns(rows[0]) - turns(rows.at(-1)); };
const [group] = [...document.querySelectorAll('#responses .group')].sort((a, b) => range(b) - range(a));
inOrder(group).slice(1, -1).forEach((other) => other.remove());
group.querySelectorAll('.clamped.tall > button').forEach((button) => button.click());
group.scrollIntoView();
return group;
"""


def conversation(page: Path) -> None:
    """Take a screenshot of two conversations about one question in the run's first step."""
    with browser(page, 1900) as driver:
        while (previous := driver.find_element("css selector", "[aria-label='previous recorded step']")).is_enabled():
            driver.execute_script("arguments[0].click()", previous)
            time.sleep(0.2)
        card = driver.execute_script(CONVERSATION)
        time.sleep(1)
        card.screenshot(str(IMAGES / "report-conversation.png"))


@contextmanager
def browser(page: Path, height: int) -> Iterator[Any]:
    """Yield a headless Chromium that shows the page."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size=1360,{height}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or "chromium"
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver") or "chromedriver"))
    try:
        driver.get(page.resolve().as_uri())
        while not driver.execute_script("return document.documentElement.dataset.ready === 'true'"):
            time.sleep(0.1)
        yield driver
    finally:
        driver.quit()


def main() -> None:
    """Draw the layout, and the curve and the report of the run that the command line names."""
    IMAGES.mkdir(exist_ok=True)
    layout().write(IMAGES / "layout.svg")
    run, talks = [*sys.argv[1:], "-", "-"][:2]
    if talks != "-":
        conversation(Path(talks) / "report.html")
    if run != "-":
        lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
        curve([json.loads(line) for line in lines]).write(IMAGES / "quickstart.svg")
        report(Path(run) / "report.html")


if __name__ == "__main__":
    main()
