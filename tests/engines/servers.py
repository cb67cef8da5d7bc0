"""Inference servers as child processes: start one on a free loopback port, kill it, start it again at the same address.

A server runs in its own session, so that a kill reaches every process of it: vLLM's workers outlive their API server
otherwise. `start` returns when the server answers; its limit is generous and only guards against hanging. A server that
dies while starting raises `ServerDied` with the end of its log.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["MODEL_NAME", "Server", "ServerDied", "sglang_server", "vllm_server"]

log = logging.getLogger(__name__)

MODEL_NAME = "tiny"
_CHECKOUT = Path(__file__).resolve().parents[2]
_START_LIMIT_S = 900.0
_END_LIMIT_S = 60.0
_POLL_S = 0.2
_LOG_TAIL = 6000  # characters


class ServerDied(Exception):
    """A server ended by itself, or did not answer in time."""


class Server:
    """One server process at a fixed address. Not running until `start`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.starts = 0
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._environment = {**os.environ, **environment}
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process that `start` made is still there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server with its start-up weights, and wait until it answers."""
        assert self._process is None, "the server was started already; kill it first"
        self._output = self._log_file.open("ab")
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.starts += 1
        log.info("server_starting url=%s pid=%d log=%s", self.url, self._process.pid, self._log_file)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End every process of the server with SIGKILL, and wait until they are gone."""
        if self._process is None:
            return
        group, deadline = self._process.pid, time.monotonic() + _END_LIMIT_S
        while _signal_group(group, signal.SIGKILL):
            self._process.poll()  # or it remains as a zombie, and its group with it
            if time.monotonic() > deadline:
                raise ServerDied(f"processes of the server at {self.url} survived SIGKILL for {_END_LIMIT_S:g} s")
            time.sleep(_POLL_S / 10)
        self._process.wait()
        self._process = None
        if self._output is not None:
            self._output.close()

    def log_tail(self) -> str:
        """The end of what the server wrote."""
        return self._log_file.read_text(errors="replace")[-_LOG_TAIL:]

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_LIMIT_S
        while not _answers(f"{self.url}/health"):
            status = self._process.poll()
            if status is not None:
                raise ServerDied(f"{self._command[2]} ended with status {status} while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerDied(f"{self._command[2]} did not answer within {_START_LIMIT_S:g} s:\n{self.log_tail()}")
            time.sleep(_POLL_S)


def vllm_server(model: Path, log_file: Path, *, keeps_weights_plain: bool = True) -> Server:
    """vLLM on CPU; without the worker extension it can reload only a part of its weights."""
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # opens the paths for loading weights and checking them
        "PYTHONPATH": str(_CHECKOUT),
    }
    # Not the `vllm` command: it looks for the metadata of a package of that name, and this one is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--max-model-len", "1024", "--max-num-seqs", "16"]
    command += ["--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    if keeps_weights_plain:
        command += ["--worker-extension-cls", "tests.engines.vllm_plain_cpu.PlainLinear"]
    return Server(command, environment, log_file)


def sglang_server(model: Path, log_file: Path) -> Server:
    """SGLang on CPU with torch's kernels."""
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--device", "cpu", "--dtype", "float32"]
    command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "20000", "--context-length", "1024"]
    command += ["--disable-overlap-schedule", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--skip-server-warmup"]
    return Server(command, environment, log_file)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anybody to signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
