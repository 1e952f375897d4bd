"""A coding agent as a program: it reads an issue and a repository, asks a model for a line, applies it, and runs the
repository's test. If the test fails, it shows the error to the model, once. It knows nothing of the trainer."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

EXAMPLES = [
    ("`fee` must add `cost` and `tip`.", "return cost * tip", "return cost + tip"),
    ("`change` must subtract `price` from `cash`.", "return cash + price", "return cash - price"),
    ("`weight` must multiply `boxes` by `mass`.", "return boxes - mass", "return boxes * mass"),
]
LINE = re.compile(r"return \w+ [-+*] \w+")


def question(issue, line):
    return f"{issue} Its test fails. Correct the line: {line}"


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def main():
    module = Path("repo/shop.py")
    line = LINE.search(module.read_text())[0]
    messages = []
    for issue, wrong, right in EXAMPLES:
        messages += [{"role": "user", "content": question(issue, wrong)}, {"role": "assistant", "content": right}]
    messages.append({"role": "user", "content": question(Path("issue.txt").read_text(), line)})
    for _ in range(2):
        reply = ask(messages)
        if patch := LINE.search(reply["content"] or ""):
            module.write_text(LINE.sub(patch[0], module.read_text()))
        test = subprocess.run([sys.executable, "test_shop.py"], cwd="repo", capture_output=True, text=True)
        if test.returncode == 0:
            return
        error = test.stderr.strip().splitlines()[-1]
        messages += [reply, {"role": "user", "content": f"The test still fails: {error}. Correct the line."}]


main()
