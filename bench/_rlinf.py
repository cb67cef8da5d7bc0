"""The rival from its own package: the replay buffer of RLinf, as its wheel has it.

`load_rlinf` gives the real classes, or the reason why it cannot. The wheel is downloaded once, without what it depends
on, checked against its known digest, kept in bench/results and imported as it is, without unpacking. Its package
wants omegaconf on import and ray for its logger, neither of which the buffer uses: so `rlinf/__init__.py` is not run,
and the buffer gets a plain logger. Every other line that runs is theirs. Use it in a process of its own where global
random states matter: their buffer seeds those of numpy.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

VERSION = "0.3.0"
SHA256 = "bce718baceb029bb7c2baa24688dc97efaf83ca1fa766cdb3cbc83789446303c"
WHEEL = f"rlinf-{VERSION}-py3-none-any.whl"
CACHE = Path(__file__).parent / "results" / "wheels"
TIMEOUT_S = 120


class Rlinf(NamedTuple):
    """The classes of the real package; `module` is rlinf.data.replay_buffer."""

    TrajectoryReplayBuffer: Any
    Trajectory: Any
    module: ModuleType


def load_rlinf(cache: Path = CACHE) -> tuple[Rlinf | None, str]:
    """RLinf's classes and "", or None and the reason."""
    wheel, reason = find_wheel(cache)
    if wheel is None:
        return None, reason
    if "rlinf" not in sys.modules:
        package = ModuleType("rlinf")
        package.__path__ = [str(wheel / "rlinf")]  # inside the archive; zipimport finds it there
        sys.modules["rlinf"] = package
    try:
        module = importlib.import_module("rlinf.data.replay_buffer")
        types = importlib.import_module("rlinf.data.embodied_io_struct")
    except ImportError as error:
        return None, f"rlinf {VERSION} cannot be imported: {error}"
    logger = logging.getLogger("rlinf")
    logger.setLevel(logging.ERROR)
    vars(module)["get_logger"] = lambda: logger
    return Rlinf(module.TrajectoryReplayBuffer, types.Trajectory, module), ""


def find_wheel(cache: Path = CACHE) -> tuple[Path | None, str]:
    """The wheel, downloaded if it is not there yet; None and the reason if it cannot be had."""
    wheel = cache / WHEEL
    if _is_right(wheel):
        return wheel, ""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        wanted = Path(temporary) / "wanted.txt"
        wanted.write_text(f"rlinf=={VERSION} --hash=sha256:{SHA256}\n")
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", temporary, "-r", str(wanted)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"rlinf {VERSION} cannot be downloaded: {error}"
        found = Path(temporary) / WHEEL
        if not _is_right(found):
            said = done.stderr.strip().splitlines() or ["pip said nothing"]
            return None, f"rlinf {VERSION} cannot be downloaded: {said[-1]}"
        found.replace(wheel)
    return wheel, ""


def _is_right(wheel: Path) -> bool:
    return wheel.is_file() and hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
