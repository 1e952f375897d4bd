"""Services for rewards under test: HTTP servers on real sockets and a tiny random reward model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

Answer = Callable[[dict], tuple[int, dict | str]]


class Server:
    """Responds to POSTs with `answer` of their JSON; records the requests, and the largest number in flight."""

    def __init__(self, answer: Answer):
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.under_way = self.most = 0
        server, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.asked.append(body)
                    server.headers.append(dict(self.headers))
                    server.under_way += 1
                    server.most = max(server.most, server.under_way)
                status, content = answer(body)
                with lock:
                    server.under_way -= 1
                if status == 0:  # disconnect
                    self.connection.close()
                    return
                text = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                if status == 429:
                    self.send_header("Retry-After", "0.05")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()


def says(text: str | None, **more) -> tuple[int, dict]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}], **more}


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def make_model(folder: Path, num_labels: int = 1, causal: bool = False) -> Path:
    """A random classifier with a character tokenizer that has no padding token; run it in a rank."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    vocabulary = {c: i for i, c in enumerate(["~", *map(chr, range(32, 126))])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="~")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    size = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config = LlamaConfig(
        **size, max_position_embeddings=256, num_labels=num_labels, initializer_range=0.3, pad_token_id=None
    )
    (AutoModelForCausalLM if causal else AutoModelForSequenceClassification).from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(folder: Path, texts: list[str]) -> list[float]:
    """The model's logit of each text alone: no batch, no padding. The end token is the padding token, so transformers
    reads the last other token. Run it in a rank."""
    from transformers import AutoModelForSequenceClassification

    found = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found.config.pad_token_id = 0
    ids = [torch.tensor([[0 if c == "~" else ord(c) - 31 for c in text]]) for text in texts]
    with torch.no_grad():
        return [found(input_ids=row).logits[0, 0].item() for row in ids]
