"""The tiny engine behind an OpenAI-compatible endpoint, in a process of its own. Stands for vLLM or SGLang.

    cd examples && python -m openai_server.server --port 8000

POST /v1/completions takes token ids and streams a chunk per token: text, token id, logprob. A client that goes away
ends its request, as with the real ones. POST /update_weights loads weights from a file that the trainer wrote. GET
/metrics says when the process started and GET /v1/loads what it runs: so the agent loop notices a restart, and waits
until the engine is idle.
Loopback only: it trusts whoever can reach it.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from tiny_grpo.engine import Engine
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, VOCABULARY, decode

__all__ = ["main"]

_MAX_BODY_BYTES = 1 << 20
_STARTED = time.time()


class Handler(BaseHTTPRequestHandler):
    """One request in a thread of its own."""

    protocol_version = "HTTP/1.1"
    engine: Engine  # set by `main`

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok", "model_step": self.engine.model_step})
        elif self.path == "/metrics":
            self._send(200, f"process_start_time_seconds {_STARTED}\n".encode(), "text/plain")
        elif self.path == "/v1/loads":
            running, waiting = self.engine.load
            load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "timestamp": time.time()}
            self._answer(200, {"loads": [load]})
        else:
            self._answer(404, {"error": f"no such path: {self.path}"})

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 < length <= _MAX_BODY_BYTES:
                raise ValueError(f"a body of {length} bytes; expected 1 to {_MAX_BODY_BYTES}")
            body = json.loads(self.rfile.read(length))
            if self.path == "/v1/completions":
                self._complete(body)
            elif self.path == "/update_weights":
                weights = torch.load(body["path"], weights_only=True)
                self.engine.load_weights(weights, int(body["model_step"])).result()
                self._answer(200, {"model_step": self.engine.model_step})
            else:
                self._answer(404, {"error": f"no such path: {self.path}"})
        except (ValueError, KeyError, TypeError, OSError) as error:
            if not self.wfile.closed:
                self._answer(400, {"error": f"{type(error).__name__}: {error}"})

    def _complete(self, body: dict[str, Any]) -> None:
        """Stream a completion, a token at a time, until its end or until the client goes away."""
        tokens: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        prompt = np.asarray(body["prompt"], dtype=np.int64)
        completing = self.engine.submit(
            prompt,
            max_tokens=int(body["max_tokens"]),
            temperature=float(body.get("temperature") or 1.0),
            seed=np.random.SeedSequence().generate_state(4).tolist(),
            on_token=lambda token, logprob: tokens.put((token, logprob)),
        )
        completing.add_done_callback(lambda _: tokens.put(None))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while (generated := tokens.get()) is not None:
                token, logprob = generated
                self._event(_chunk(decode([token]), [token], [logprob], None))
            self._event(_chunk("", [], [], completing.result().finish_reason))
            self._raw(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            completing.cancel()  # the client has gone: nobody wants the rest
            self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        self._raw(f"data: {json.dumps(content)}\n\n".encode())

    def _raw(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Thousands of requests a minute are no news."""


def _chunk(text: str, token_ids: list[int], logprobs: list[float], finish_reason: str | None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": text,
        "token_ids": token_ids,
        "logprobs": {"tokens": [text] * len(token_ids), "token_logprobs": logprobs},
        "finish_reason": finish_reason,
    }
    return {"object": "text_completion", "choices": [choice]}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection has aborted its request, which is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Handler.engine = Engine(Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT)), end_token=END)
    server = Server(("127.0.0.1", options.port), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        Handler.engine.close()


if __name__ == "__main__":
    main()
