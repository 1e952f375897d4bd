"""One module per command of `megagrpo`: `add_arguments(parser)` declares options, `run(options)` returns the exit code.

A module of a command imports nothing slow at its top, so `megagrpo --help` is fast; `run` imports what it needs. The
module's docstring is the description that `megagrpo NAME --help` prints.
"""

FOLDERS = {
    "setup": ("install", "init", "doctor", "keys", "schema"),
    "runs": ("replay",),
    "checkpoints": ("convert", "export", "merge", "inspect", "roundtrip"),
}
"""Folders below this one, and the commands whose modules they hold."""

COMMANDS: dict[str, str] = {  # name -> summary in `megagrpo --help`
    "install": "install vLLM and more extras for this machine",
    "train": "train on this machine, or run one rank under a launcher",
    "sft": "fine-tune on the responses of rows, without vLLM",
    "dpo": "learn from pairs of responses: DPO, SimPO, ORPO and more",
    "reward": "train a reward model on pairs of responses",
    "init": "create a folder with data, a reward, a config and a README",
    "check": "check data, prompts and rewards of a run in seconds",
    "doctor": "check this machine before the first run",
    "plan": "check a run and predict memory and time",
    "verify": "compare parallel layouts with a single process",
    "eval": "evaluate held-out sets with vLLM",
    "generate": "prompt a model or a checkpoint",
    "report": "write one HTML page with the curves and responses of runs",
    "replay": "make a run again from its kept rollouts, and compare",
    "audit": "recompute a dumped training step in float64",
    "serve": "start vLLM servers for a trainer on other machines",
    "submit": "write or submit the job of a run for Slurm",
    "launch": "start several ranks of a command on this machine",
    "convert": "convert Hugging Face weights to a Megatron checkpoint",
    "export": "convert a Megatron checkpoint to a Hugging Face folder",
    "merge": "merge a LoRA adapter into its model",
    "inspect": "list the tensors of a checkpoint, an adapter or a model",
    "roundtrip": "check that converting a model there and back changes no byte",
    "keys": "list the keys of a config with type, default and meaning",
    "schema": "print the JSON schema of a config, for editors",
}
NOW_SCRIPTS = {"new-family": "a script of a clone: python checkpoints_tools/new_family.py"}
"""Commands of older versions, and what they are now."""


def module_of(name: str) -> str:
    """Return the dotted name of a command's module."""
    folder = next((f"{folder}." for folder, names in FOLDERS.items() if name in names), "")
    return f"megagrpo.commands.{folder}{name.replace('-', '_')}"
