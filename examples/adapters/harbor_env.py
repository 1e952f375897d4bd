"""Tasks of Harbor, the framework of Terminal-Bench: folders with instruction.md, task.toml, environment/ and tests/.

    multi_turn:
      environment: examples/adapters/harbor_env.py:Harbor
      environment_args: {name: docker}

`name` is one of Harbor's environments, such as `docker`, `podman`, `daytona` or `modal`, or a class of your own as
`package.module:Class`. The policy is the agent: its tool `bash` runs commands in the task's environment, and Harbor's
verifier gives the reward. The column `task` of a row is the folder.

`python examples/adapters/harbor_env.py FOLDER > rows.jsonl` writes the rows of a folder of tasks.
API: https://www.harborframework.com/docs, package `harbor`. Tested with 0.26.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from megagrpo.environments.episodes.episode import EnvironmentLost
from megagrpo.platform.process.cleanup.removal import remove_tree

try:
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.task.task import Task
    from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
    from harbor.models.trial.paths import TrialPaths
    from harbor.trial.network_policy import resolve_trial_network_plan
    from harbor.verifier.factory import VerifierFactory
except ImportError as error:
    raise ImportError(f"multi_turn.environment: pip install 'harbor>=0.26' ({error})") from error

_SHARED = VerifierEnvironmentMode.SHARED
_BASH = {
    "name": "bash",
    "description": "Runs a bash command in the task's environment. Returns what it prints, and its exit code if not 0.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command."}},
        "required": ["command"],
    },
}


class Harbor:
    """A trial of a task. Each has a container of its own, which `close` removes.

    `name` is the provider. `seconds` limits a command. `reward` names the verifier's reward where it writes several.
    Further arguments are options of the provider, as those of Harbor's `--environment-kwarg`.
    """

    def __init__(self, name: str, seconds: int = 60, reward: str = "reward", **kwargs: Any):
        provider = {"import_path": name} if ":" in name else {"type": name}
        self._config = EnvironmentConfig.model_validate(provider | {"kwargs": kwargs})
        self._seconds, self._reward = seconds, reward
        self._folder: str | None = None  # of the trial's files on this host
        self._task: Any = None
        self._environment: Any = None

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the schema of `bash`, in OpenAI's format."""
        return [{"type": "function", "function": _BASH}]

    async def reset(self, task: str) -> None:
        """Start the environment of a task in a new container. The last one is removed."""
        await self.close()
        self._task = usable(Path(task))
        self._folder = tempfile.mkdtemp(prefix="harbor-")
        self._paths = TrialPaths(Path(self._folder))
        self._paths.mkdir()
        config, agent, verifier = self._task.config, AgentConfig(), VerifierConfig()
        self._plan = resolve_trial_network_plan(config, agent, self._config, verifier, None, verifier_mode=_SHARED)
        self._environment = EnvironmentFactory.create_environment_from_config(
            config=self._config,
            environment_dir=self._task.paths.environment_dir,
            environment_name=self._task.short_name,
            session_id=f"{self._task.short_name}__megagrpo-{secrets.token_hex(4)}__env",
            trial_paths=self._paths,
            task_env_config=config.environment,
            network_policy=self._plan.agent_env_baseline,
            phase_network_policies=[self._plan.agent_phase, self._plan.verifier_phase],
        )
        await asyncio.wait_for(self._environment.start(force_build=False), config.environment.build_timeout_sec)
        await self._environment.run_healthcheck()
        await self._allow(self._plan.agent_phase)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a command as the task's agent."""
        with self._environment.with_default_user(self._task.config.agent.user):
            result = await self._environment.exec(arguments["command"], timeout_sec=self._seconds)
        parts = [text.rstrip("\n") for text in (result.stdout, result.stderr) if text]
        return "\n".join([*parts, *([f"exit code {result.return_code}"] if result.return_code else [])])

    async def get_reward(self) -> float:
        """Run the task's tests. Raises EnvironmentLost if they write no reward of the name."""
        config = self._task.config.verifier
        await self._allow(self._plan.verifier_phase)
        verifier = VerifierFactory.create_verifier_from_config(
            VerifierConfig(), task=self._task, trial_paths=self._paths, environment=self._environment
        )
        with self._environment.with_default_user(config.user):
            rewards = (await asyncio.wait_for(verifier.verify(), config.timeout_sec)).rewards
        if not isinstance(rewards, dict) or self._reward not in rewards:
            reason = f"the tests of {self._task.task_dir} wrote no reward `{self._reward}` but {rewards!r:.200}"
            raise EnvironmentLost(f"{reason}; set environment_args.reward")
        return float(rewards[self._reward])

    async def close(self) -> None:
        """Stop and remove the container, also one that has only begun to start."""
        environment, folder, self._environment, self._folder = self._environment, self._folder, None, None
        try:
            if environment is not None:
                await environment.stop(delete=True)
        finally:
            if folder is not None:
                remove_tree(folder)

    async def _allow(self, policy: Any) -> None:
        """Give the environment the network of the agent or the verifier, where the two differ."""
        if policy != self._environment.network_policy:
            await self._environment.set_network_policy(policy)


def usable(folder: Path) -> Any:
    """Return the task of a folder. Raises EnvironmentLost for a task that needs Harbor's own loop."""
    task = Task(folder)
    if task.has_steps:
        raise EnvironmentLost(f"the task {folder} has several steps, which only Harbor's own agents take")
    if resolve_task_verifier_mode(task.config) != _SHARED:
        raise EnvironmentLost(f"the tests of {folder} need a container of their own, which only Harbor itself starts")
    return task


def main() -> None:
    """Write the tasks of a folder as rows: `prompt` and `task`. Tasks that cannot be used are named on stderr."""
    (folder,) = sys.argv[1:]
    for path in sorted(path.parent for path in Path(folder).resolve().glob("*/task.toml")):
        try:
            instruction = usable(path).instruction
        except Exception as error:
            print(f"{path} is left out: {error}", file=sys.stderr)
            continue
        print(json.dumps({"prompt": [{"role": "user", "content": instruction}], "task": str(path)}))


if __name__ == "__main__":
    main()
