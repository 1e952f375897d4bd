"""Files and servers that a run cannot use are reported with their key before anything starts."""

import json
import os
import threading
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.config import ConfigError, DatasetSection, load_config
from megagrpo.config.basics.problems import Problem, ProblemError
from megagrpo.data.tokens.tokenizer import Tokenizer, read_chat_template
from megagrpo.engine.http.probe import check_plugin, check_tool_parser
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.records.checkpoints.checkpoint import readable
from megagrpo.records.checkpoints.run_lock import RunLock
from megagrpo.records.rows.jsonl_file import JsonlFile
from megagrpo.trainer.saving.time_limit import check_time_limit
from megagrpo.weights.blocks.parameter_blocks import tensor_names
from megagrpo.weights.bridge.load import Checkpoint
from tests.unit.for_each import for_each

LLAMA = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LLAMA |= dict(
    intermediate_size=128, vocab_size=256, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True
)


class Letters(Tokenizer):
    """A token per character, and transformers' own rendering."""

    def __init__(self):
        self.eos_token_ids, self._chat_template, self.template_kwargs = (0,), None, {}

    def __len__(self):
        return 128

    pieces = decode = token_text = special_ids = None

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))

    def _apply_template(self, messages, options):
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template([messages], chat_template=options["chat_template"])[0][0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0]['contents'].upper() }}", "UndefinedError: "),
        ("{% for m in messages %}", ", line 1 cannot render "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no system') }}", "TemplateError: no system"),
        ("{{ messages | nosuchfilter }}", "No filter named 'nosuchfilter'"),
        ("{{ messages + 1 }}", "TypeError: "),
    ],
    ids=["undefined", "open loop", "division", "own error", "no filter", "wrong type"],
)
def test_any_error_of_a_chat_template_is_one_line_with_the_key(template, said):
    with pytest.raises(ValueError) as caught:
        Letters().render("hi", chat_template=template)
    line = str(caught.value)
    assert line.startswith("data.chat_template: ") and said in line and "\n" not in line
    assert line.endswith("; correct the template, or the prompt")


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"^data\.chat_template: .*t\.jinja is not UTF-8 text"):
        read_chat_template(str(tmp_path / "t.jinja"))


@contextmanager
def server(answer: bytes, content_type: str, status: int = 200):
    """Start a web server that gives this response to every request; return its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args): ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@for_each("answer", ["null", "[]", "{}", '{"results": []}', '{"results": null}', "7", "<html>hello</html>", ""])
def test_a_server_that_is_no_vllm_is_named(answer):
    with server(answer.encode(), "text/html" if answer.startswith("<") else "application/json") as url:
        with pytest.raises(ValueError) as caught:
            check_plugin([url])
    assert str(caught.value).startswith(f"rollout.urls: {url} is not a vLLM server (") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message", "is_refused"),
    [
        (200, "", False),
        (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', True),
        (400, "a chat template is needed", False),
        (403, "Scale-out endpoints are disabled.", True),
        (404, "Not Found", True),
    ],
)
def test_a_server_without_a_tool_parser_is_named_if_the_run_needs_one(status, message, is_refused):
    with server(json.dumps({"error": {"message": message}}).encode(), "application/json", status) as url:
        check_tool_parser([url], None)
        reason = rf"^multi_turn\.tool_parser: {url} does not parse .* --tool-call-parser hermes\. Response: "
        with pytest.raises(ValueError, match=reason) if is_refused else nullcontext():
            check_tool_parser([url], "hermes")


def test_an_invalid_address_is_named_by_the_probe():
    with pytest.raises(ValueError, match=r"^rollout\.urls: http://127\.0\.0\.1:99999 does not respond: "):
        check_plugin(["http://127.0.0.1:99999"])


def test_layers_that_only_config_json_has_are_named_before_a_server_starts(tmp_path):
    names = tensor_names(parse_hf_config(LLAMA)) - {"lm_head.weight"}
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    Checkpoint(tmp_path).check_all(parse_hf_config(LLAMA))
    with pytest.raises(ValueError, match=r"^model: .* lacks model\.layers\.2\."):
        Checkpoint(tmp_path).check_all(parse_hf_config(LLAMA | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight; if the embeddings are tied"):
        Checkpoint(tmp_path).check_all(parse_hf_config(LLAMA | {"tie_word_embeddings": False}))


def test_a_run_folder_that_cannot_be_made_is_named():
    lock = RunLock(folder := Path("/proc/nope/run"))
    with pytest.raises(ValueError) as caught:
        lock.take()
    assert str(caught.value).startswith(f"run.output_dir: {folder} cannot be created or written to: ")
    assert str(caught.value).endswith("; name another folder")


def test_a_time_limit_without_time_for_a_step_is_refused_at_once():
    said = (
        r"^run\.time_limit: 0:01:45 is 105 s, of which 105 s are for a checkpoint, so no step can begin; raise it "
        r"above 105 s"
    )
    with pytest.raises(ConfigError, match=said):
        check_time_limit("0:01:45")
    check_time_limit("0:01:46")
    check_time_limit(None)


def test_a_lone_surrogate_is_a_line_of_json_that_reads_back(tmp_path):
    file = JsonlFile(tmp_path / "a.jsonl", 0)
    file.append([{"step": 1, "response": "a\ud83db"}, {"step": 2, "response": "é🙂"}])
    file.close()
    lines = (tmp_path / "a.jsonl").read_bytes().decode().splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["a\ud83db", "é🙂"]


NO_UTF8 = {"a.jsonl": b'{"prompt": "\xff\xfe"}\n', "a.csv": b"prompt\n\xff\n", "b.csv": b"a\n\xc3"}


@pytest.mark.parametrize(("name", "content"), NO_UTF8.items(), ids=NO_UTF8)
def test_data_that_are_no_utf8_are_named(tmp_path, name, content):
    from megagrpo.data.sources.data_sources import load_rows

    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^data\.train\.source: .*{name} is not UTF-8 text \(.*\); save it in UTF-8$"
    ):
        load_rows(DatasetSection(source=str(tmp_path / name)), "data.train", 1, "prompt")


def test_small_sizes_keep_their_digits():
    sizes = {
        0: "0 bytes",
        512: "512 bytes",
        1024: "1 KiB",
        3_575_644: "3.41 MiB",
        2**30: "1 GiB",
        97 * 2**30: "97 GiB",
        2**40: "1 TiB",
    }
    assert {size: readable(size) for size in sizes} == sizes


def test_problems_are_compared_by_keys_and_never_by_words():
    problem = Problem(("parallel.sequence_parallel", "parallel.tp"), "needs parallel.tp > 1; set rollout.tp")
    assert problem.is_about(["parallel.tp"]) and problem.is_about(["parallel"]) and problem.is_about(["parallel.tp.x"])
    assert not problem.is_about(["rollout.tp", "parallel.t", "tp", "parallel.tp2"])
    error = ProblemError(problem, problem)
    assert str(error).split("\n") == [str(problem)] * 2 and error.problems == (problem, problem)


def test_a_pipe_of_the_shell_is_a_config_and_no_file_names_one(tmp_path):
    read, write = os.pipe()
    os.write(write, b"defaults: megagrpo:quickstart\nrun: {name: piped}\n")
    os.close(write)
    assert load_config(f"/dev/fd/{read}").run.name == "piped"
    (tmp_path / "run.yaml").write_text(f"defaults: /dev/fd/{read}\n")
    with pytest.raises(ConfigError, match="cannot read it: it is no regular file"):
        load_config(tmp_path / "run.yaml")
    os.close(read)
