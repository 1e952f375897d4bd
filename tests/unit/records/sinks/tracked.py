"""A run of two steps and an evaluation, written to the trackers: `python tracked.py FOLDER RESTORED_STEP
OVERRIDE...`. With RESTORED_STEP `fails` a new run that ends with an error after its second step."""

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


if __name__ == "__main__":
    start = {"fails": True} if sys.argv[2] == "fails" else {"restored_step": int(sys.argv[2])}
    write(Path(sys.argv[1]), *sys.argv[3:], **start)
