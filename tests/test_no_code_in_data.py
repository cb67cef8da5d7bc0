"""G9: nothing in the package can execute what it reads."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.processes import finished

PACKAGE = Path(__file__).parent.parent / "src" / "forebay"
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_g09_no_module_of_the_package_names_a_way_to_run_data() -> None:
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                found += [(file.name, name) for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                found.append((file.name, str(node.module)))
            elif isinstance(node, ast.Call):
                attribute = node.func.attr if isinstance(node.func, ast.Attribute) else None
                if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                    found.append((file.name, node.func.id))
                if attribute == "load" and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                    if (owner == "torch" and not safe) or owner in ("np", "numpy"):
                        found.append((file.name, ast.unparse(node)))
                if any(k.arg == "allow_pickle" for k in node.keywords):
                    found.append((file.name, ast.unparse(node)))
    assert not found


READING = """
import pickle, sys

def refuse(*arguments, **named):
    raise SystemExit("data was executed")

pickle.loads = pickle.load = pickle.Unpickler = pickle._Unpickler = refuse  # marshal reads Python's own bytecode
import asyncio
from forebay import ReplayBuffer
from forebay.storage.sqlite import SQLiteStorage

async def main(directory):
    buffer = ReplayBuffer(storage=SQLiteStorage(directory + "/store.db"))
    await buffer.resume(directory + "/checkpoint")
    records = await buffer.query({})
    assert await buffer.read(records[0].uid)
    other = ReplayBuffer()
    await other.resume(directory + "/checkpoint")
    print(len(records), len(other))

asyncio.run(main(sys.argv[1]))
"""


def test_g09_a_store_and_a_checkpoint_are_read_without_unpickling(tmp_path: Path) -> None:
    make = (
        "import asyncio, sys; from forebay import ReplayBuffer; from forebay.storage.sqlite import SQLiteStorage\n"
        "from forebay.testing import make_group\n"
        "async def main(d):\n"
        "    b = ReplayBuffer(storage=SQLiteStorage(d + '/store.db'))\n"
        "    await b.put(make_group(), 'math'); await b.save(d + '/checkpoint', model_step=0); await b.close()\n"
        "asyncio.run(main(sys.argv[1]))"
    )
    assert finished("-c", make, tmp_path).returncode == 0
    reading = finished("-c", READING, tmp_path)
    assert reading.stdout == "1 1\n", reading.stderr
