"""Programs against tests of every shape: the truth table, which block is the program, and which rows cannot be
scored."""

import functools
import json
import re
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megagrpo.config import RewardsSection
from megagrpo.rewards.functions.code_execution import CodeExecution
from megagrpo.rewards.functions.program_tests import TEST_COLUMNS, read_tests
from megagrpo.rewards.functions.program_text import program_of
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.for_each import for_each

TABLE = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "programs.jsonl").read_text().splitlines()]
OF_EACH_SHAPE = 2  # rows of the table that run in each test run
made = functools.cache(functools.partial(CodeExecution, seconds=3.0))  # it tries the sandbox each time
ADD, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return [a, b]\n"
SQUARE = "n = int(input())\nprint(n * n)\n"
PAIRS = [{"input": "3\n", "output": "9\n"}, {"input": "2", "output": "4"}]


def score(completion, tests=None, partial=False, prompt=None, **columns):
    row = {name: [value] for name, value in {"tests": tests, **columns}.items()}
    return made(partial=partial)([completion], prompts=[prompt] if prompt else None, **row)[0]


def wrong_rows(rows):
    def scored(row):
        facts = {name: row[name] for name in ("expected_output", *TEST_COLUMNS) if name in row}
        return score(row["completion"], row["tests"], **facts), made().row_fault(tests=row["tests"], **facts)

    made(), made(partial=False)  # before the threads
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(scored, rows))
    return [(v, f, r) for (v, f), r in zip(got, rows, strict=True) if v != r["value"] or (v is None) != (f is not None)]


def test_each_shape_of_the_truth_table_gets_the_right_reward():
    by_shape = defaultdict(list)
    for row in TABLE:
        by_shape[row["shape"]].append(row)
    assert len(TABLE) > 150 and len(by_shape) > 14
    assert wrong_rows([row for rows in by_shape.values() for row in rows[:OF_EACH_SHAPE]]) == []


@pytest.mark.full
def test_the_whole_truth_table_gets_the_right_rewards():
    assert wrong_rows(TABLE) == []


ENDS = {
    "exit()": 1.0,
    "quit()": 1.0,
    "import sys\nsys.exit(0)": 1.0,
    "raise SystemExit": 1.0,
    "exit(1)": 0.0,
    "import sys\nsys.exit('message')": 0.0,
    "1 / 0": 0.0,
    "import os, sys\nsys.stdout.flush()\nos._exit(0)": 0.0,
}


@for_each("end, value", ENDS.items())
def test_a_program_passes_if_it_ends_with_status_0_after_its_output(end, value):
    assert score(f"print(3)\n{end}", expected_output="3") == value


PROGRAMS = {
    "a thread": "import threading\nthreading.Thread(target=lambda: print(int(input()) ** 2)).start()",
    "atexit": "import atexit, sys\natexit.register(print, int(input()) ** 2)",
    "another stdout": "import io, sys\nsys.stdout = io.StringIO()\nprint(int(input()) ** "
    "2)\nsys.__stdout__.write(sys.stdout.getvalue())",
    "bytes": "import os, sys\nn = int(os.read(0, 99))\nsys.stdout.buffer.write(b'%d' % (n * n))",
    "a dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass N:\n    "
    "n: int\n"
    "print(N(int(input())).n ** 2)",
    "pickle": "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\nprint(int(input()) ** 2)",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_may_use_what_a_python_process_offers(program):
    assert score(program, PAIRS[:1]) == 1.0


STUB = 'def f(x):\n    """Double x."""\n'
DOCUMENTED = "def f():\n    '''\n    ```python\n    f()\n    ```\n    '''\n    return 1"
BLOCKS = [  # response, names that the tests call, program
    ("```python\nx = f(1)\n```\nand\n```py\nprint(1)\n```\nfor\n```sh\nls\n```", "", "print(1)"),
    ("```sh\nls\n```", "", None),
    ("print(1)", "", "print(1)"),
    ("I do not know.", "f", None),
    ("```python\nprint(1)\n```\nIt prints\n```\n3\n4\n```", "", "print(1)"),
    ("```python\nprint(1)\n```\nIt prints\n```\nYES\n```\nor\n~~~\nx = 5\n~~~", "", "print(1)"),
    ("```python\nprint(1)\n```\nIt prints\n```text\nprint(2)\n```", "", "print(1)"),
    ("```python\ndef f(): return 1\n```\nUsage:\n```python\nprint(f())\n```", "f", "def f(): return 1"),
    ("```python\ndef f(): print(1)\nf()\n```\nUsage:\n```python\nf()\n```", "", "def f(): print(1)\nf()"),
    ("```python\ndef f(): return 1\n```\nBetter:\n```python\ndef f(): return 2\n```", "f", "def f(): return 2"),
    (
        "```python\ndef f(): return g()\ndef g(): return 1\n```\n```python\ndef g(): return 2\n```",
        "f g",
        "def f(): return g()\ndef g(): return 1",
    ),
    (
        "```python\nclass Solution:\n    def f(self): pass\n```\n```python\nSolution().f()\n```",
        "f",
        "class Solution:\n    def f(self): pass",
    ),
    (f"````python\n{DOCUMENTED}\n````", "f", DOCUMENTED),
    (f"```python\n{DOCUMENTED}\n```\nDone.", "f", DOCUMENTED),
    ("~~~~ python\nprint(1)\n~~~\n~~~~~", "", None),
    ("~~~ python\nprint(1)\n~~~~~\nDone.", "", "print(1)"),
    ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "", "if 1:\n    print(1)"),
    ("- ```python\n  print(1)\n  ```", "", "print(1)"),
    ("Answer: ```python\nprint(1)```", "", "print(1)"),
    ("```python\nprint(1)\n", "", "print(1)\n"),
    ("```python\ndef f(:\n\n```python\nprint(1)\n```", "", "print(1)"),
    ("```markdown\nSo:\n```python\nprint(1)\n```\n```", "", "print(1)"),
    ("```Python title=x\r\nprint(1)\r\n```", "", "print(1)"),
    ("```{.python}\nprint(1)\n```", "", "print(1)"),
    ("<answer>\n```python\nprint(1)\n```</answer>", "", "print(1)"),
    ("<answer>print(1)</answer>", "", "print(1)"),
    ("<think>```python\nprint(1)\n```</think>\n```python\nprint(2)\n```", "", "print(2)"),
    ("thought, then </think>\nprint(2)", "", "\nprint(2)"),
    ("<think>\n```python\nprint(1)\n```", "", None),
    ("    return 2 * x\n", "f", f"{STUB}    return 2 * x\n"),
    ("```python\n    return 2 * x\n```", "f", f"{STUB}    return 2 * x"),
    ("y = 2 * x\n    return y", "f", f"{STUB}    y = 2 * x\n    return y"),
    ("prose, and more prose", "f", None),
]


@for_each("response, names, program", BLOCKS)
def test_one_rule_says_which_block_is_the_program(response, names, program):
    assert program_of(response, frozenset(names.split()), "", STUB if names else "") == program


def test_a_thought_that_the_chat_template_opens_and_the_response_does_not_close_has_no_program():
    assert (
        program_of("print(1)", prefix="<think>\n") is None
        and program_of("x</think>print(1)", prefix="<think>\n") == "print(1)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "`" * 100_000,
        "```\n" * 20_000,
        "```\n~~~\n" * 10_000,
        '```python\n"""\n```\n' * 10_000,
        "(" * 100_000,
        '"""' * 50_000,
        "x```\n" * 20_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_hostile_response_takes_time_linear_in_its_length(text):
    def seconds(part):
        begun = time.process_time()
        program_of(part, frozenset({"f"}), "", STUB)
        return time.process_time() - begun

    # quadratic time would be 16 times as much, and more
    assert seconds(text) < 16 * (seconds(text[: len(text) // 4]) + 0.02)


CHECKS_NOTHING = [
    *(
        "# later",
        "pass",
        "assert True",
        "assert 1 == 1",
        "assert (add(1, 2) == 4, 'message')",
        "add(1, 2)",
        "print(add(1, 2) == 3)",
    ),
    *(
        "def helper():\n    assert add(1, 2) == 3",
        "def test_add():\n    add(1, 2)",
        "x = add(1, 2)",
        "for x in []: pass",
        "raise ValueError",
    ),
    *(
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        add(1, 2)",
        "class TestAdd:\n    pass",
    ),
]
FAULTS = [  # tests, columns, fault
    *((tests, {}, "`tests` checks nothing: ") for tests in CHECKS_NOTHING),
    ("def add(a, b): return a + b\nassert add(1, 2) == 3", {}, "`tests` calls nothing of the program"),
    ("assert add(1, 2) ==", {}, r"`tests` is neither JSON nor valid Python \(invalid syntax, line 1\)"),
    ("[", {}, "`tests` is neither JSON nor valid Python"),
    ("assert add(1, 2) == 3\nreturn", {}, r"`tests` is not valid Python \('return' outside function, line 2\)"),
    ("eJxrYJmqzQABPRwMAA8fAkk=", {}, "`tests` is neither JSON nor valid Python|`tests` checks nothing"),
    ("def check(candidate):\n    assert candidate(1, 2) == 3", {}, "the row has no `entry_point` to call it with"),
    (
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        {"entry_point": "import os"},
        "`entry_point` is not a function's name",
    ),
    ("def test_a(capsys):\n    assert add(1, 2) == 3", {}, "takes the fixture `capsys`, which is not supported"),
    ("async def test_a():\n    assert add(1, 2) == 3", {}, "test function `test_a` is async"),
    ("import pytest\n@pytest.mark.skip\ndef test_a():\n    assert add(1, 2) == 3", {}, "has the mark `skip`"),
    (
        "class TestA:\n    def __init__(self): pass\n    def test_a(self):\n        assert add(1, 2) == 3",
        {},
        "class `TestA`, which has `__init__`",
    ),
    ("import absent_module\nassert add(1, 2) == 3", {}, "`tests` imports `absent_module`, which is not installed"),
    ("from your_module import add\nassert add(1, 2) == 3", {}, "the program is the module `solution`"),
    ("from .solution import add\nassert add(1, 2) == 3", {}, "`tests` imports `.solution`"),
    (["assert add(1, 2) == 3"], {"test_setup_code": "import absent_module"}, "`tests` imports `absent_module`"),
    (["assert add(1, 2) == 3"], {"test_imports": ["def"]}, "`test_setup_code` or `test_imports` is not valid Python"),
    ([], {}, r"`tests` is empty: \[\]"),
    (None, {}, "neither `tests` nor `expected_output` has a value"),
    ({"inputs": [], "outputs": []}, {}, "`tests` is empty"),
    ({"inputs": ["1"], "outputs": []}, {}, "`tests` has 1 inputs and 0 outputs"),
    ([1, 2], {}, "`tests` has no known shape"),
    ([{"in": "a", "out": "b"}], {}, "`tests` has no known shape: a dict with the keys in, out"),
    ({"inputs": [[1, 2]], "outputs": [3]}, {}, "arguments for a function, and the row names none"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], {}, "`tests` calls a function, and the row names none"),
    (
        [{"input": "a b", "output": "2", "testtype": "functional"}],
        {"fn_name": "f"},
        "an input that cannot be read as arguments: 'a b'",
    ),
    ({"fn_name": "f", "inputs": [[1]], "outputs": [None]}, {}, "each expected value is None"),
    ([{"input": "1", "output": "2", "type": "checker"}], {}, "cases of the type 'checker'"),
    ({"language": "cpp", "test_cases": [{"input": "1", "output": "1"}]}, {}, "`language` is 'cpp'"),
    (PAIRS, {"language": "JavaScript"}, "`language` is 'JavaScript'"),
    ([{"input": "", "output": "x" * 99_999}], {}, "an expected output has 97 KB, above output_kb 64"),
    ("[" * 99_999, {}, "."),
]


@for_each("tests, columns, fault", FAULTS)
def test_a_row_that_cannot_be_scored_is_named_and_its_responses_get_none(tests, columns, fault):
    said = made().row_fault(tests=tests, answer="other columns are ignored", **columns)
    assert said is not None and re.search(fault, said), said
    assert score(ADD, tests, **columns) is None and score("no code", tests, **columns) is None


UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n    def test_a(self):\n"
)
PASSES = {  # tests that `add` passes and WRONG does not
    "a loop": "for x in (1, 2):\n    assert add(x, 1) == x + 1",
    "if and raise": "if add(1, 2) != 3:\n    raise ValueError",
    "elif and raise": "x = 1\nif x == 2:\n    x = 3\nelif add(x, 2) != 3:\n    raise ValueError\nassert x == 1",
    "a called helper": "def same(a, b):\n    assert a == b\nsame(add(1, 2), 3)",
    "check called by the text": "def check(f):\n    assert f(1, 2) == 3\ncheck(add)",
    "a test called under the main "
    "guard": "def test_a():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    test_a()",
    "one line": "x = 1; assert add(x, 2) == 3; é = 'é'; assert add(x, 1) == 2",
    "several lines": "assert (\n    add(1,\n        2)\n    == 3\n), '''é\n'''",
    "a fence": "```python\nassert add(1, 2) == 3\n```",
    "a byte order mark": "\ufeffassert add(1, 2) == 3",
    "an exit": "import sys\nassert add(1, 2) == 3\nsys.exit(0)",
    "numpy": "import numpy as np\nnp.testing.assert_allclose(add(1, 2), 3)",
    "the program as a module": "import solution as s\ndef test_a():\n    assert s.add(1, 2) == 3",
    "a star import": "from solution import *\ndef test_a():\n    assert add(1, 2) == 3",
    "set-up in the list": ["import math", "assert add(1, 2) == math.floor(3.2)"],
    "unittest with subtests": f"{UNITTEST}        with self.subTest():\n            self.assertEqual(add(self.x, 2), "
    f"3)\nunittest.main()",
    "unittest with a runner": f"{UNITTEST}        assert add(self.x, 2) == 3\nsuite = "
    f"unittest.TestLoader().loadTestsFromTestCase(T)\n"
    "unittest.TextTestRunner().run(suite)",
    "unittest by inheritance": "from unittest import TestCase, main\nclass Base(TestCase):\n    def test_a(self):\n"
    "        self.assertEqual(add(1, 2), 3)\nclass T(Base): pass\nif __name__ == '__main__':\n    main()",
    "pytest classes": "class TestA:\n    def setup_method(self):\n        self.x = 1\n    def helper(self): pass\n    "
    "def test_a(self):\n"
    "        assert add(self.x, 2) == 3\n    def test_b(self):\n        self.helper()",
    "pytest fixtures and parameters": "import pytest\n@pytest.fixture\ndef one():\n    return 1\n@pytest.fixture()\n"
    "def two(one):\n    yield one + 1\n"
    "@pytest.mark.parametrize('a', [1, pytest.param(2, id='x')])\n@pytest.mark.parametrize(('b', 'c'), [(1, 0)])\n"
    "def test_a(a, b, c, two):\n    assert add(a, two) == pytest.approx(a + b + 1 + c)\n"
    "def test_b():\n    with pytest.raises(TypeError):\n        add('a', 1)",
    "verl's assert_case": {"fn_name": "add", "assert_case": ["assert add(1, 2) == 3"]},
    "keywords": {"fn_name": "add", "inputs": [{"a": 1, "b": 2}], "outputs": [3]},
    "LeetCode's text": [{"input": "a = 1, b = 2", "output": "3"}],
    "JSON in JSON": json.dumps(json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])),
}


@for_each("tests", PASSES.values())
def test_tests_of_any_form_tell_a_right_program_from_a_wrong_one(tests):
    columns = {"fn_name": "add"} if "3" in str(tests) and "output" in str(tests) else {}
    assert (score(ADD, tests, **columns), score(WRONG, tests, **columns)) == (1.0, 0.0)


SHARES = [  # program, tests, columns, share
    (SQUARE.replace("n * n", "n + n"), PAIRS, {}, 0.5),
    (ADD, "assert add(1, 2) == 3\nassert add(1, 2) == 4", {}, 0.5),
    (
        ADD,
        "def check(candidate):\n    assert candidate(1, 2) == 4\n    assert candidate(1, 1) == 2",
        {"entry_point": "add"},
        0.5,
    ),
    (
        ADD,
        "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    import time\n    time.sleep(99)\n    assert "
        "add(1, 2) == 3",
        {},
        0.5,
    ),
    (ADD, "assert add(1, 2) == 3\nassert add(1, 1) == 2\nadd(1)", {}, 0.5),
    (ADD, [{"fn_name": "add", "input": [1, 2], "output": 3}, {"assert_case": ["assert add(1, 2) == 4"]}], {}, 0.5),
    (ADD, [{"fn_name": "add", "input": [1, 2], "output": 4}, {"assert_case": ["assert add(1, 2) == 3"]}], {}, 0.5),
    (
        "import time\ndef f(x):\n    if x == 2: time.sleep(99)\n    return x",
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]},
        {},
        0.5,
    ),
    (
        "def f(x):\n    return x if x == 1 else [x]",
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]},
        {},
        0.5,
    ),
]


@for_each("program, tests, columns, share", SHARES)
def test_with_partial_each_shape_gives_the_share_of_its_tests(program, tests, columns, share):
    assert score(program, tests, partial=True, **columns) == share and score(program, tests, **columns) == 0.0


def test_a_test_that_runs_no_check_fails_and_code_after_the_last_test_may_not_raise():
    assert score("def f(): return []", "for x in f():\n    assert x") == 0.0
    assert score(ADD, "assert add(1, 2) == 3\nadd(1)") == 0.0


VALUES = [  # body of f, expected value, reward
    ("return (1, [2, (3,)])", [1, [2, [3]]], 1.0),
    ("return 0.1 + 0.2", 0.3, 1.0),
    ("return 0.3001", 0.3, 0.0),
    ("return {1: 2}", {"1": 2}, 1.0),
    ("import numpy\n    return numpy.arange(3)", [0, 1, 2], 1.0),
    ("return [3]", 3, 0.0),
    ("return '3'", 3, 0.0),
    ("return type('Any', (), {'__eq__': lambda self, other: True})()", 3, 0.0),
    ("raise ValueError", "", 0.0),
]


@for_each("body, expected, value", VALUES)
def test_returned_values_are_compared_as_json_reads_them(body, expected, value):
    assert score(f"def f(x):\n    {body}", {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}) == value


LEETCODE = (
    "def check(candidate):\n    assert candidate(nums = [2, 7], target = 9) == [0, 1]\n    assert candidate(nums = [], "
    "target = 1) == []"
)
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> Optional[List[int]]:
        seen = defaultdict(int)
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
        return []
"""


def test_a_leetcode_program_may_use_the_names_that_the_site_provides():
    assert (
        score(TWO_SUM, LEETCODE, entry_point="Solution().twoSum") == 1.0
        and score(TWO_SUM, LEETCODE, entry_point="twoSum") == 1.0
    )
    starter = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
    cases = [{"input": "[2, 7]\n9", "output": "[0, 1]", "testtype": "functional"}]
    assert score(TWO_SUM, cases, starter_code=starter) == 1.0
    assert score("def f(x: List): return x", "assert f([1]) == [1]") == 0.0  # there a program needs its imports


PROMPT = 'from math import pi\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef half(x: int):\n    """Undo twice."""\n'
HALVES = "def check(candidate):\n    assert candidate(twice(3)) == 3"


def test_a_response_may_continue_or_use_the_code_of_its_humaneval_prompt():
    message = [{"role": "user", "content": f"Complete:\n```python\n{PROMPT}```"}]
    for prompt in (PROMPT, message):
        assert score("    return x // 2\n", HALVES, prompt=prompt, entry_point="half") == 1.0
        assert (
            score(
                "```python\ndef half(x):\n    assert twice(1) == 2 and pi > 3\n    return x // 2\n```",
                HALVES,
                prompt=prompt,
                entry_point="half",
            )
            == 1.0
        )
        assert score("    return x\n", HALVES, prompt=prompt, entry_point="half") == 0.0
        assert score("print(1)", HALVES, prompt=prompt, entry_point="half") == 0.0
    solved = "Shorten this:\n```python\ndef half(x):\n    y = x // 2\n    return y\n```"
    assert (
        score("print(1)", "def check(candidate):\n    assert candidate(6) == 3", prompt=solved, entry_point="half")
        == 0.0
    )


def test_mbpp_set_up_runs_before_the_tests():
    assert (
        score(
            "def first(x): return x[0]",
            ["assert first(v) == math.ceil(0.5)"],
            test_setup_code="v = [1]",
            test_imports=["import math"],
        )
        == 1.0
    )


@for_each(
    "written",
    [
        str,
        json.dumps,
        lambda lines: json.dumps("\n".join(lines)),
        "\n".join,
        lambda lines: '"""Set up."""\n' + lines[0],
    ],
)
def test_the_set_up_may_be_json_text(written):
    setup = written(["import math"])
    for column in ("test_imports", "test_setup_code"):
        found = read_tests(["assert first([1]) == math.ceil(0.5)"], **{column: setup}).python.steps
        assert [step[1] for step in found if step[0] == "setup"] == [setup if setup[:3] == '"""' else "import math"]


def test_the_further_columns_reach_the_reward_in_its_worker():
    columns = {"tests": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}
    with RewardScorer(RewardsSection(functions=[{"function": "code_execution"}], workers=1), 100) as scorer:
        scored = scorer.score(
            [Rollout(Prompt(0, (1,), "Q", columns), (1,), (0.0,), "stop", 0, text) for text in (ADD, WRONG)]
        )
    assert [s.reward for s in scored] == [1.0, 0.0]
