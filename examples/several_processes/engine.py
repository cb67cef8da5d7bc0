"""An engine for this example: an HTTP server that "generates" tokens with the weights that it was given last.

    python engine.py PORT

POST /generate {"prompt": ...} answers {"tokens": [...], "model_step": ...} after a moment; POST /weights {"step": n}
loads weights. A real run has vLLM or SGLang here, and an `OpenAIAgentLoop` in the producers.
"""

from __future__ import annotations

import json
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

weights = {"step": 0}


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/weights":
            weights.update(asked)
            answer: dict[str, Any] = dict(weights)
        else:
            step = weights["step"]
            time.sleep(random.uniform(0.01, 0.1))
            answer = {"tokens": [random.randrange(1_000) for _ in range(random.randint(1, 20))], "model_step": step}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine)
    print(f"engine on port {server.server_port}", flush=True)
    server.serve_forever()
