"""Runs of two steps and an evaluation, written to the trackers."""

import os
import subprocess
import sys
from pathlib import Path

from megagrpo.config import load_config
from megagrpo.records.rows.completions import completion_row
from megagrpo.records.rows.jsonl_file import encoded
from megagrpo.records.writer import MetricsWriter
from megagrpo.types import Prompt, Rollout, ScoredRollout

CONFIG = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
HOSTILE = "7 <b>|`*\n\ud800"  # markup, and a lone surrogate, which has no UTF-8 bytes
ENCODED = "7 <b>|`*\n\\ud800"
COLUMNS = ["step", "prompt", "completion", "rewards/exact", "rewards/judge", "exact/found", "reward", "advantage"]


def scored(text: str, reward: float, **extra) -> ScoredRollout:
    rollout = Rollout(Prompt(5, (1,), [{"role": "user", "content": "3 + 4?"}]), (9,), (-0.1,), "stop", 1, text)
    return ScoredRollout(rollout, {"exact": reward, "judge": None}, reward, extra)


def write(folder: Path, *overrides: str, restored_step: int = 0, fails: bool = False) -> None:
    """Write an evaluation before the first step, and the two steps after `restored_step`; the reward of a step is a
    tenth of it. With `fails` the run then ends with SystemExit 3."""
    config = load_config(CONFIG, [f"run.output_dir={folder.parent}", f"run.name={folder.name}", *overrides])
    with MetricsWriter(folder, config, restored_step) as writer:
        if not restored_step:
            writer.evaluation(0, {"reward": 0.25, "pass@1": 0.5})
        for step in (restored_step + 1, restored_step + 2):
            both = [scored("8", 0.0), scored(HOSTILE, 1.0, **{"exact/found": "7"})]
            writer.completions(
                step, iter([encoded(completion_row(step, *pair) for pair in zip(both, (-1.0, 1.0), strict=True))])
            )
            writer.step(step, {"reward": step / 10, "kl": float("nan")})
        if fails:
            raise SystemExit(3)


def in_a_process(package: str, folder: Path, starts: tuple[str, ...], *overrides: str, **variables: str) -> int:
    """Write a run below `folder` for each of `starts`, a restored step or `fails`, in a process. Return its exit code.
    It leaves no message on stderr, and none with the name of the tracker's package."""
    ended = subprocess.run(
        [sys.executable, "-m", __name__, str(folder), ",".join(starts), *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[4],
        env=os.environ | variables,
    )
    assert ended.stderr == "" and package not in ended.stdout, ended
    return ended.returncode


if __name__ == "__main__":
    for start in sys.argv[2].split(","):
        if start == "fails":
            write(Path(sys.argv[1]) / "failed", *sys.argv[3:], fails=True)
        write(Path(sys.argv[1]) / "mine", *sys.argv[3:], restored_step=int(start))
