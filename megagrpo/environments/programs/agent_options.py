"""Defines the mapping form of `multi_turn.agent`: an agent that is a function or a command, and its address."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, model_validator

from megagrpo.config.basics.problems import Problem, ProblemError
from megagrpo.config.sections.section import NonNegativeInt, PositiveInt, Seconds, Section
from megagrpo.environments.programs.work_folder import PLACEHOLDER, parts_of
from megagrpo.rewards.registry.target import Target
from megagrpo.suggestions import did_you_mean

AGENT = "multi_turn.agent"
PROGRAM_HOST = Target("megagrpo.environments.programs.program_host", "ProgramHost")
OWN_PLACEHOLDERS = ("workdir", "name", "prompt")
_OF_CONTAINER = {"workdir", "name", "socket"}  # placeholders that a container has without a row
MAX_OUTPUTS = 8 << 20  # bytes of `outputs`: JSON may need six for one
UNIX = "unix"  # `listen`: a socket in a folder, `{socket}`


class AgentOptions(Section):
    """A text stands for `{function: TEXT}`. docs/containers.md describes what a command can have."""

    function: str | None = None
    command: tuple[str, ...] = ()  # argv; the others from `container` to `output_mb` need it
    roles: dict[str, float] = Field(default_factory=dict)  # of a function
    listen: str = "lo"  # interface, address or UNIX
    certificate: str | None = None  # file in PEM; the address then speaks https
    certificate_key: str | None = None
    container: str = "{command}"
    start: str = ""
    stop: str = ""
    names: str = ""  # prints the names of containers, of which a killed run may have left some
    warm: NonNegativeInt = 0  # containers that are started before their conversations, per rank
    warm_seconds: Seconds = 3600.0  # without a conversation, after which one is stopped
    files: dict[str, str] = Field(default_factory=dict)
    before_score: str = ""  # ends what the agent has left in a container of `start`
    score: tuple[str, ...] = ()
    score_files: dict[str, str] = Field(default_factory=dict)
    score_seconds: Seconds | None = None
    reward_file: str | None = None
    outputs: dict[str, PositiveInt] = Field(default_factory=dict)  # the most bytes of each file
    variables: tuple[str, ...] = ()
    concurrent: PositiveInt | None = None
    output_mb: PositiveInt = 16

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> AgentOptions:
        if problems := list(self._contradictions()):
            raise ProblemError(*problems)
        return self

    def _contradictions(self) -> Iterator[Problem]:
        if (self.function is None) == (not self.command):
            yield Problem((AGENT,), "needs `function` or `command`, and not both; name one")
        of_command = self.model_fields_set - {"function", "roles", "listen", "certificate", "certificate_key"}
        if self.function is not None:
            yield from (Problem((f"{AGENT}.{name}",), "needs `command`; leave it out") for name in sorted(of_command))
        if self.roles and self.function is None:
            yield Problem((f"{AGENT}.roles",), "needs `function`, which returns a reward for each role; leave it out")
        if (self.certificate is None) != (self.certificate_key is None):
            yield Problem((f"{AGENT}.certificate",), "needs certificate_key, and the reverse; name both files or none")
        if is_wildcard(self.listen):
            reason = f"`{self.listen}` is every interface of the machine; name one, such as docker0, or its address"
            yield Problem((f"{AGENT}.listen",), reason)
        if self.listen == UNIX:
            yield from self._unix_problems()
        yield from self._container_problems()
        for name in ("score_files", "before_score"):
            if getattr(self, name) and not self.score:
                yield Problem((f"{AGENT}.{name}",), "needs `score`, the command that it is for")
        names = [("files", name) for name in self.files] + [("score_files", name) for name in self.score_files]
        names += [("outputs", name) for name in self.outputs]
        if sum(self.outputs.values()) > MAX_OUTPUTS:
            yield Problem((f"{AGENT}.outputs",), f"at most {MAX_OUTPUTS} bytes in all reach a reward; lower the limits")
        for key, name in names + [("reward_file", self.reward_file or "")] * (self.reward_file is not None):
            try:
                parts_of(name)
            except ValueError as error:
                yield Problem((f"{AGENT}.{key}",), str(error))

    def _container_problems(self) -> Iterator[Problem]:
        for name in ("container", "start", "stop", "names", "before_score"):
            yield from _template_problems(name, getattr(self, name))
        if self.warm and (not self.start or (of_row := [*set(PLACEHOLDER.findall(self.start)) - _OF_CONTAINER])):
            reason = f"`start` names {{{min(of_row)}}}, which only a row has" if self.start else "needs `start`"
            yield Problem((f"{AGENT}.warm",), f"{reason}; start a container that fits every row, or leave warm out")
        if self.names and (not self.stop or set(PLACEHOLDER.findall(self.names + self.stop)) - {"name"}):
            yield Problem(
                (f"{AGENT}.names",), "needs a `stop` whose only placeholder is {name}, and has none; name both"
            )

    def _unix_problems(self) -> Iterator[Problem]:
        if self.function is not None or self.certificate is not None:
            reason = "unix is for a `command`, and has no certificate; name an interface, or leave the other out"
            yield Problem((f"{AGENT}.listen",), reason)
        elif self.container != "{command}" and "{socket}" not in self.container + self.start:
            reason = "unix needs the folder {socket} in the container at its own path: --ro-bind {socket} {socket}"
            yield Problem((f"{AGENT}.listen",), reason)

    def program(self, seconds: float) -> dict[str, Any]:
        """Return the fields of `program_run.Program`, of which a command may take `seconds`."""
        templates = {name: shlex.split(getattr(self, name)) for name in ("container", "start", "stop", "before_score")}
        named = {
            name: getattr(self, name) for name in ("command", "files", "score", "score_files", "outputs", "variables")
        }
        named["seconds"], named["score_seconds"] = seconds, self.score_seconds or seconds
        return named | templates | {"reward_file": self.reward_file, "output_bytes": self.output_mb << 20}

    @property
    def columns(self) -> list[str]:
        """The columns that placeholders name, in order."""
        sources = [*self.files.values(), *self.score_files.values()]
        container = [word for word in shlex.split(self.container) if word != "{command}"]
        texts = [*self.command, *self.score, *container, self.start, self.stop, self.before_score, *sources]
        names = [name for text in texts for name in PLACEHOLDER.findall(text)]
        own = {*OWN_PLACEHOLDERS, *(["socket"] if self.listen == UNIX else [])}
        return [name for name in dict.fromkeys(names) if name not in own]


def agent_options(agent: str | Mapping[str, Any]) -> AgentOptions:
    """Return the options of a value of `multi_turn.agent`. Raises ProblemError with all that is wrong."""
    try:
        return AgentOptions.model_validate({"function": agent} if isinstance(agent, str) else agent)
    except ValidationError as error:
        problems = [problem for one in error.errors() for problem in _described(one)]
        raise ProblemError(*problems) from None


def _described(error: Any) -> Sequence[Problem]:
    if isinstance(found := error.get("ctx", {}).get("error"), ProblemError):
        return found.problems
    key = ".".join([AGENT, *map(str, error["loc"])])
    if error["type"] != "extra_forbidden":
        return [Problem((key,), f"{error['msg'].lower()} (got {error['input']!r:.60})")]
    known = list(AgentOptions.model_fields)
    hint = did_you_mean(str(error["loc"][0]), known)
    return [Problem((key,), f"unknown{hint}; known: {', '.join(known)}")]


def _template_problems(name: str, template: str) -> Iterator[Problem]:
    try:
        words = shlex.split(template)
    except ValueError as error:
        yield Problem((f"{AGENT}.{name}",), f"cannot be split into words: {error}; close the quote")
        return
    if (name == "container") != ("{command}" in words):
        reason = (
            "needs the word {command}, where the image's command goes" if name == "container" else "has no {command}"
        )
        yield Problem((f"{AGENT}.{name}",), reason)


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*", "0")
