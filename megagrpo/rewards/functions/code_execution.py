"""The reward code_execution: runs a completion's Python program in a sandbox against tests or an expected output."""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.functions.program_tests import TEST_COLUMNS, RowTests, read_tests
from megagrpo.rewards.functions.program_text import is_stub, outline, program_of
from megagrpo.rewards.functions.text_rewards import text_of
from megagrpo.rewards.sandbox.sandbox import Checks, Limits, missing_guarantees, run

log = get_logger(__name__)


@dataclass(eq=False)
class CodeExecution:
    """Returns 1.0 when the completion's program passes all tests of column `tests`, or prints column `expected_output`;
    else 0.0. With `partial` it returns the share of passed tests. Returns None for a row whose tests are invalid,
    empty or missing; `row_fault` returns the reason.

    docs/rewards.md#programs has the shapes of `tests`, the other columns, and which part of a response is the program.

    `seconds` limits a process. Python tests and function calls share the program's; each stdin input starts another.
    Outputs and returned values are compared outside the sandbox. `packages` allows imports of installed packages.

    `sandbox: required` raises ValueError if the kernel lacks a sandbox guarantee; `best_effort` logs it.
    """

    needs_columns = (("tests", "expected_output"),)
    columns_read = ("tests", "expected_output", *TEST_COLUMNS)
    completions_per_call = 1  # so that slow programs do not use up each other's deadline

    sandbox: Literal["required", "best_effort"] = "required"
    partial: bool = False
    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 64
    file_mb: int = 16
    packages: bool = True

    def __post_init__(self) -> None:
        if self.sandbox not in ("required", "best_effort"):
            raise ValueError(f"code_execution: sandbox {self.sandbox!r} must be required or best_effort")
        for name in ("seconds", "memory_mb", "output_kb", "file_mb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"code_execution: {name} {getattr(self, name)} must be above 0")
        self._limits = Limits(self.seconds, self.memory_mb, self.output_kb, self.file_mb)
        self._last: tuple[str, RowTests | str] = "", ""  # the row read last, for the other completions of its group
        if missing := missing_guarantees():
            what = f"code_execution: this kernel lacks guarantees of the sandbox: {', '.join(missing)}"
            if self.sandbox == "required":
                raise ValueError(
                    f"{what}. Fix: allow seccomp with its listener, and Landlock or user namespaces; or accept it with "
                    "args: {sandbox: best_effort}"
                )
            log.warning(what)

    def __call__(
        self,
        completions: list[Any],
        prompts: list[Any] | None = None,
        prefixes: list[str] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """`columns` are those of `columns_read` that the rows have."""
        scores = list[float | None]()
        for i, completion in enumerate(completions):
            row = {name: values[i] for name, values in columns.items() if values is not None}
            read = self._read(row)
            prompt, prefix = prompts[i] if prompts else "", prefixes[i] if prefixes else ""
            scores.append(
                None if isinstance(read, str) else self._score(text_of(completion), read, row, prompt, prefix or "")
            )
        return scores

    def row_fault(self, **columns: Any) -> str | None:
        """Return why a row cannot be scored; None for a row that can. `columns` are the row's values."""
        read = self._read({name: columns[name] for name in self.columns_read if name in columns})
        return read if isinstance(read, str) else None

    def _read(self, row: dict[str, Any]) -> RowTests | str:
        """Return the row's tests, or why it has none."""
        key = repr(row)
        if key != self._last[0]:
            try:
                read: RowTests | str = self._within_limit(read_tests(**row, packages=self.packages))
            except (ValueError, RecursionError, MemoryError) as error:
                read = str(error)
            self._last = key, read
        return self._last[1]

    def _within_limit(self, tests: RowTests) -> RowTests:
        """Return the tests. Raises ValueError for an expected output above `output_kb`."""
        for _, output in tests.pairs:
            if len("\n".join(_lines(output)).encode("utf-8", "replace")) > self._limits.output_kb << 10:
                raise ValueError(
                    f"an expected output has {len(output) >> 10} KB, above output_kb {self._limits.output_kb}: "
                    f"{output!r:.50}"
                )
        return tests

    def _score(self, text: str, tests: RowTests, row: dict[str, Any], prompt: Any, prefix: str) -> float:
        context = _context(row, prompt) if row.get("entry_point") and not tests.pairs else ""
        program = program_of(text, tests.names, prefix, context)
        if program is None:
            return 0.0
        passed = self._passed_checks(program, tests, context)
        for stdin, output in tests.pairs if self.partial or all(passed) else []:
            passed.append(self._prints(program, stdin, output))
            if not (passed[-1] or self.partial):
                break
        return sum(passed) / tests.count if self.partial else float(sum(passed) == tests.count)

    def _passed_checks(self, program: str, tests: RowTests, context: str) -> list[bool]:
        """Run the row's calls, then its Python tests, in one process. Returns one boolean for each that has run."""
        if not (tests.calls or tests.python.count):
            return []
        checks = Checks(
            setup=self._setup(program, tests, context),
            steps=[*(("call", call) for call in tests.calls), *tests.python.steps],
            function=tests.function,
            count=len(tests.calls) + tests.python.count,
            stop_early=not self.partial,
        )
        limit = (1 << 20) + 4 * len(json.dumps(tests.expected))
        ran = run(program, self._limits, checks, packages=self.packages, report_bytes=limit)
        values, passed = ran.results[: len(tests.calls)], ran.passed[len(tests.calls) :]
        # code after the last test raised
        ended_early = ran.ended != "done" and len(passed) == tests.python.count and all(passed)
        return tests.matches(values) + (passed[:-1] if ended_early else passed)

    def _setup(self, program: str, tests: RowTests, context: str) -> str:
        """Return code to run before a program: the prompt's code, and imports that a site such as LeetCode provides."""
        outlined = outline(program)
        if outlined is None or not (tests.function or context or "Solution" in outlined.defines):
            return ""
        return f"{definitions(outlined.unbound)}\n{context}"

    def _prints(self, program: str, stdin: str, output: str) -> bool:
        ran = run(program, self._limits, stdin=stdin, packages=self.packages)
        return ran.ended == "done" and ran.passed == [True] and _lines(ran.stdout) == _lines(output)


def _context(row: dict[str, Any], prompt: Any) -> str:
    """Return starter code, or prompt code, that ends in the function `entry_point` without a body; "" without one."""
    name = str(row["entry_point"])
    for text in (row.get("starter_code"), text_of(prompt) if prompt else ""):
        code = program_of(text, {name}) if isinstance(text, str) else None
        if code is not None and is_stub(code, name):
            return code
    return ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


_MODULES = (
    "bisect cmath collections copy datetime decimal functools fractions heapq itertools json math operator random re "
    "statistics string sys time typing"
).split()
# A module, then names that are imported from it.
_IMPORTS = """
typing Any Callable Deque DefaultDict Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping NamedTuple
typing Optional Sequence Set Tuple Type TypeVar Union
collections ChainMap Counter OrderedDict defaultdict deque namedtuple
heapq heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest
bisect bisect_left bisect_right insort insort_left insort_right
functools cache cmp_to_key lru_cache partial reduce total_ordering
itertools accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby islice
itertools pairwise permutations product repeat starmap takewhile tee zip_longest
math ceil comb cos dist e exp factorial fabs floor gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sin sqrt tan
math trunc
string ascii_letters ascii_lowercase ascii_uppercase digits punctuation
operator add and_ attrgetter itemgetter mul or_ sub xor
random choice randint shuffle
decimal Decimal
fractions Fraction
dataclasses dataclass field
abc ABC abstractmethod
enum Enum
copy deepcopy
sys maxsize
"""
_CLASSES = {
    "ListNode": "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n",
    "TreeNode": "class TreeNode:\n    def __init__(self, val=0, left=None, right=None):\n"
    "        self.val, self.left, self.right = val, left, right\n",
}


def definitions(names: Set[str]) -> str:
    """Return code that defines those of `names` that a site provides; "" for none."""
    lines = [f"import {module}\n" for module in _MODULES if module in names]
    for module, *provided in map(str.split, _IMPORTS.strip().splitlines()):
        if mine := [name for name in provided if name in names]:
            lines.append(f"from {module} import {', '.join(mine)}\n")
    return "".join([*lines, *(code for name, code in _CLASSES.items() if name in names)])
