"""A tool that runs code in a SandboxFusion server (ByteDance), by its HTTP protocol.

    multi_turn:
      tools: ["examples/adapters/sandbox_fusion.py:SandboxFusion"]

The policy gets the tool `run_code`: POST /run_code with `code`, `language` and `run_timeout`. The variable
SANDBOX_FUSION_URL has the address of the server. Protocol: https://bytedance.github.io/SandboxFusion/docs/docs/reference/run-code
"""

from __future__ import annotations

import os
from typing import Any

import httpx

RUN_SECONDS = 5.0
MOST_CHARACTERS = 10_000  # of a result
_PARAMETERS = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "The program. Print what you want to see."},
        "language": {"type": "string", "description": 'The language, such as "python", "cpp" or "bash".'},
    },
    "required": ["code"],
}


class SandboxFusion:
    """The tool `run_code`."""

    def __init__(self) -> None:
        address = os.environ.get("SANDBOX_FUSION_URL", "http://127.0.0.1:8080")
        self._http = httpx.Client(base_url=address.rstrip("/"), timeout=60.0)

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the schema of `run_code`."""
        description = "Runs a program in a sandbox. Returns what it prints."
        function = {"name": "run_code", "description": description, "parameters": _PARAMETERS}
        return [{"type": "function", "function": function}]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a program. Returns its output and its errors. Raises RuntimeError when the sandbox failed."""
        # The policy may send any argument, and the server takes more of them: limits, files to write and to fetch.
        chosen = {key: value for key, value in arguments.items() if key in _PARAMETERS["properties"]}
        body = {"language": "python", **chosen, "run_timeout": RUN_SECONDS, "compile_timeout": RUN_SECONDS}
        answer = self._http.post("/run_code", json=body).raise_for_status().json()
        if answer["status"] == "SandboxError":
            raise RuntimeError(f"the sandbox failed: {answer.get('message')}")
        parts: list[str] = []
        for step in (answer.get("compile_result"), answer.get("run_result")):
            if step is None:
                continue
            parts += [step.get("stdout") or "", step.get("stderr") or ""]
            if step["status"] != "Finished":
                parts.append(f"stopped after {step.get('execution_time', RUN_SECONDS):.1f} s: {step['status']}")
            elif step.get("return_code"):
                parts.append(f"exit status {step['return_code']}")
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}\n[{len(text)} characters in all]"
