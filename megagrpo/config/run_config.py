"""Defines `RunConfig`, the configuration of a run: all sections and the sizes that follow from several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import model_validator

from megagrpo.config.basics.problems import ProblemError
from megagrpo.config.rules.config_rules import cross_field_problems, step_problems
from megagrpo.config.sections.algorithm import AlgorithmSection
from megagrpo.config.sections.data import DataSection
from megagrpo.config.sections.evaluation import EvaluationSection, evaluation_sets
from megagrpo.config.sections.lora import LoraSection
from megagrpo.config.sections.model import ModelSection, ParallelSection
from megagrpo.config.sections.multi_turn import MultiTurnSection
from megagrpo.config.sections.rewards import RewardsSection
from megagrpo.config.sections.rollout import RolloutSection
from megagrpo.config.sections.run import DebugSection, RunSection
from megagrpo.config.sections.section import Section
from megagrpo.config.sections.training import TrainSection
from megagrpo.config.tasks import OrFile, Task, TaskSection, task_values


class RunConfig(Section):
    """The configuration of a run. `defaults:` in a YAML file names the file that it extends."""

    run: RunSection = RunSection()
    model: ModelSection
    lora: LoraSection = LoraSection()
    parallel: ParallelSection = ParallelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    multi_turn: MultiTurnSection = MultiTurnSection()
    data: DataSection = DataSection()
    rewards: RewardsSection = RewardsSection()
    tasks: list[Annotated[TaskSection, OrFile()]] = []
    """Tasks of which each step has prompts by `weight`, or their files, as `[math.yaml, code.yaml]`. What a task does
    not say comes from the run. docs/tasks.md."""
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    debug: DebugSection = DebugSection()

    @property
    def each_task(self) -> list[Task]:
        """The tasks in order, at least one. Raises pydantic's ValidationError for a task that `load_config` refuses."""
        return self._named_tasks or [Task("", 1.0, self, {})]

    @cached_property
    def _named_tasks(self) -> list[Task]:
        of_run, tasks = self.model_dump(exclude={"tasks"}), [task.model_dump() for task in self.tasks]
        configs = [RunConfig.model_validate(task_values(of_run, task)) for task in tasks]
        pairs = zip(self.tasks, configs, strict=True)
        return [
            Task(task.name, task.weight, config, task.sampling, task.epochs, task.loss_weight) for task, config in pairs
        ]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> RunConfig:
        """Return a copy as pydantic does, whose tasks follow its own values."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_named_tasks", None)
        return copied

    @property
    def all_rewards(self) -> RewardsSection:
        """The section `rewards` with the functions of all tasks, named as `TASK/FUNCTION`."""
        if not self.tasks:
            return self.rewards
        functions = [
            function.model_copy(update={"name": task.named(name)})
            for task in self.each_task
            for name, function in zip(task.config.rewards.names, task.config.rewards.functions, strict=True)
        ]
        return self.rewards.model_copy(update={"functions": functions})

    @property
    def task_rewards(self) -> dict[str, list[str]]:
        """The names in `all_rewards` of each task's functions, by the task's name; empty without `tasks`."""
        named = [task for task in self.each_task if task.name]
        return {task.name: [task.named(name) for name in task.config.rewards.names] for task in named}

    @property
    def samples_per_row(self) -> int:
        """Responses of a prompt: sampled, or those of its row."""
        return self.rollout.num_generations if self.algorithm.loss.generates else self.algorithm.loss.group

    @property
    def generates(self) -> bool:
        """Whether the run samples responses, with servers: its method does, and no kept rollouts replace them."""
        return self.algorithm.loss.generates and self.rollout.kept.path is None

    @property
    def without_servers(self) -> RunConfig:
        """The config as the planner sees it: with servers elsewhere, if the run starts none."""
        if self.generates:
            return self
        rollout = self.rollout.model_copy(update={"placement": "external", "urls": ["http://unused:1"]})
        return self.model_copy(update={"rollout": rollout})

    @property
    def weighs_tasks(self) -> bool:
        """Whether tasks have other shares of the loss than `loss_type` gives them."""
        return self.algorithm.loss_share_of_tasks is not None or len({task.loss_weight for task in self.tasks}) > 1

    @property
    def group_sizes(self) -> dict[str, int]:
        """The responses to a prompt of each task, by the task's name; "" without `tasks`."""
        return {task.name: task.config.rollout.num_generations for task in self.each_task}

    @property
    def has_own_sampling(self) -> bool:
        """Whether prompts may have sampling parameters of their own."""
        return any(task.config.data.sampling_column is not None or task.sampling for task in self.each_task)

    @property
    def max_response_length(self) -> int:
        """Longest response of any task in tokens, messages of tools and schedulers included."""
        of_turn = self.rollout.max_completion_length
        return max(task.config.multi_turn.max_response_length or of_turn for task in self.each_task)

    @property
    def response_limit(self) -> str:
        """The config key that sets `max_response_length`, with its value, as text for messages."""
        for task in self.each_task:
            if task.config.multi_turn.max_response_length == self.max_response_length:
                return f"{task.key('multi_turn.max_response_length')} {self.max_response_length}"
        return f"max_completion_length {self.rollout.max_completion_length}"

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.rollout.max_prompt_length + self.max_response_length

    @property
    def synced_adapters(self) -> int:
        """Adapters that a vLLM server uses at once: the newest and one per step of staleness. 0: it gets weights."""
        return 1 + self.rollout.max_staleness if self.lora.syncs_adapters else 0

    @property
    def syncs_weights(self) -> bool:
        """Whether vLLM gets weights: all, or once the rounded ones below the adapters that it gets alone."""
        return not self.lora.syncs_adapters or self.model.base_storage != "none"

    @property
    def towers(self) -> Literal["frozen", "trained"] | None:
        """What happens to the vision tower; None: prompts have no images."""
        if not self.data.images:
            return None
        return "frozen" if self.model.freeze_vision_tower else "trained"

    @property
    def leaves_weights(self) -> bool:
        """Whether weight syncs leave weights of vLLM as loaded: those below adapters, or a frozen tower."""
        return self.lora.syncs_adapters or self.towers == "frozen"

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and vLLM use a GPU's memory in turns: vLLM sleeps during training, the trainer offloads
        during generation (`train.offload`)."""
        return self.rollout.placed == "colocated" and self.train.offload is not False

    @property
    def longest_sequence(self) -> int:
        """An engine's longest sequence in tokens: the longest sample, or longest prompt plus evaluation response, or
        what an own judge reads and writes."""
        responses = [self.max_response_length, *(s.max_completion_length for s in evaluation_sets(self).values())]
        responses.append(self.all_rewards.judge_length(max(responses)))
        return self.rollout.max_prompt_length + max(responses)

    @property
    def micro_batch_align(self) -> int:
        """Every micro-batch is padded to a multiple of this many tokens, for the layout and for products in FP8. With
        `train.overlap: [tp]` all have the same length: Transformer Engine's communication buffers have one size."""
        align, budget = self.parallel.micro_batch_align(self.model.token_align), self.train.max_tokens_per_micro_batch
        return max(align, budget // align * align) if "tp" in self.train.overlap else align

    @property
    def one_connection(self) -> bool:
        """Whether ranks on GPUs before Blackwell need CUDA_DEVICE_MAX_CONNECTIONS=1: tensor and context parallelism
        launch messages before products. `train.overlap: [experts]` needs several, to run two micro-batches at once."""
        return max(self.parallel.tp, self.parallel.cp) > 1 and "experts" not in self.train.overlap

    def shares_prompts(self, transformer_engine: bool) -> bool:
        """Whether responses in a micro-batch share one copy of their prompt (`train.share_prompts`).

        Without a choice they do, except on Transformer Engine with context parallelism, whose ring cannot (our slower
        attention would run in its place), or with its fused rotation, which begins each sequence at position 0.
        """
        if self.train.share_prompts is not None:
            return self.train.share_prompts
        return not transformer_engine or (self.parallel.cp == 1 and "rope" not in self.model.fusions)

    @property
    def without_overlap(self) -> RunConfig:
        """The config with the messages of a step one after the other, by NCCL or gloo."""
        parallel = self.parallel.model_copy(update={"expert_dispatcher": "alltoall"})
        return self.model_copy(update={"parallel": parallel, "train": self.train.model_copy(update={"overlap": []})})

    def with_num_prompts(self, num_prompts: int) -> RunConfig:
        """Return the config with `run.max_steps` from `run.num_train_epochs` and `num_prompts` training prompts; itself
        if `run.num_train_epochs` does not decide. Raises ProblemError when other keys do not fit the steps."""
        run = self.run
        if run.max_steps is not None or run.num_train_epochs is None:
            return self
        steps = math.ceil(Fraction(str(run.num_train_epochs)) * num_prompts / self.rollout.prompts_per_step)
        config = self.model_copy(update={"run": run.model_copy(update={"max_steps": steps})})
        if problems := list(step_problems(config)):
            raise ProblemError(*problems)
        return config

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        if problems := cross_field_problems(self):
            raise ProblemError(*problems)
        return self
