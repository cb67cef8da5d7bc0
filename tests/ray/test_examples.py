"""The examples on Ray, each as a user starts it: in a process of its own, with a Ray of its own.

None joins the cluster of these tests. Every process that belongs to a run, those of its Ray as well, is known by a mark
in its environment: so what is left of a run is found, whatever it is called.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from forebay.cli import main
from forebay.ray import RayReplayBuffer
from forebay.trajectory import TrajectoryReplayBuffer
from tests.processes import HANG_S, ROOT, finished, started
from tests.ray.conftest import LocalCluster

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import ray_grpo.run  # noqa: E402
import ray_trajectories  # noqa: E402

SHORT = ("--engines", "1", "--task", "add", "--warm-start", "2")
_MARK = "FOREBAY_TEST_RUN"


class Place:
    """Where a run puts its temporary files, and how it is found again."""

    def __init__(self, files: Path) -> None:
        self.files = files
        without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        without["PYTHONPATH"] = str(ROOT / "src")
        self.environment = without | {_MARK: str(files), "RAY_TMPDIR": str(files)}

    def run(self, *command: str) -> tuple[int, str, str]:
        done = finished(*command, cwd=EXAMPLES, env=self.environment)
        return done.returncode, done.stdout, done.stderr

    def interrupted(self, *command: str, after: str) -> tuple[int, str, str]:
        """Run it, and press Ctrl-C once a line begins so: the whole group of processes gets the signal."""
        with started(*command, cwd=EXAMPLES, env=self.environment) as child:
            assert child.stdout is not None
            seen = ""
            for line in child.stdout:
                seen += line
                if line.startswith(after):
                    break
            os.killpg(child.pid, signal.SIGINT)
            output, errors = child.communicate()
        return child.returncode, seen + output, errors

    def processes(self) -> list[str]:
        mark = f"{_MARK}={self.files}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes() + b"\0":
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or is somebody else's
                continue
        return found

    def left(self) -> list[str]:
        """Files and processes; agents of Ray need a moment to miss their node."""
        deadline = time.monotonic() + HANG_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.processes() + [str(path) for path in self.files.iterdir()]


@pytest.fixture
def place() -> Iterator[Place]:
    """On machines with /proc only, such as those that Ray runs clusters on."""
    with tempfile.TemporaryDirectory(prefix="fb-", dir="/tmp", ignore_cleanup_errors=True) as files:
        yield Place(Path(files))


# --- ray_grpo -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tiny_trainer_learns_on_ray_and_goes_on_where_it_was(place: Place, tmp_path: Path) -> None:
    command = ("-m", "ray_grpo.run", *SHORT, "--out", str(tmp_path / "run"))
    storage = ("--storage", f"sqlite:///{tmp_path}/buffer.db")
    code, output, errors = place.run(*command, *storage, "--steps", "3", "--save-every", "2")
    assert errors == ""
    assert code == 0
    assert re.search(r"^step +3/3 +reward +add 0\.\d\d +staleness \d\.\d\d", output, re.MULTILINE), output
    assert "ledger of add, closed: {" in output
    assert "'trained': 72" in output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step_3", "weights-000003.pt"]

    code, _, errors = place.run(*command, "--steps", "5")
    assert code == 2
    assert "contains a run already; give --resume" in errors

    code, output, errors = place.run(*command, *storage, "--steps", "5", "--resume")
    assert errors == ""
    assert code == 0
    assert "'trained': 120" in output
    assert place.left() == []


@pytest.mark.slow
def test_ctrl_c_ends_the_trainer_with_a_checkpoint_and_leaves_no_process_and_no_file(
    place: Place, tmp_path: Path
) -> None:
    command = ("-m", "ray_grpo.run", *SHORT, "--steps", "100000", "--out", str(tmp_path / "run"))
    code, output, errors = place.interrupted(*command, after="step   10")
    assert errors == ""
    assert code == 130
    assert "stopping after this step" in output
    stopped = re.search(r"stopped at step (\d+) of 100000; continue with --resume", output)
    assert stopped is not None, output
    assert (tmp_path / "run" / f"weights-{int(stopped[1]):06d}.pt").exists()
    assert place.left() == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "0"], "--steps is 0; expected at least 1"),
        (["--engines", "-1"], "--engines is -1"),
        (["--task", "fly"], "invalid choice: 'fly'"),
        (["--resume", "--out", "nowhere"], "there is no checkpoint in --out nowhere"),
        (["--keep"], "it needs --address"),
    ],
)
def test_the_trainer_refuses_a_wrong_argument(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ray_grpo.run.parse(arguments)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
async def test_the_trainer_joins_a_cluster_and_keeps_its_buffer_if_told_to(
    place: Place, cluster: LocalCluster, new_name: Callable[[], str]
) -> None:
    name = new_name()
    place.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the nodes are on the loopback address
    command = ("-m", "ray_grpo.run", *SHORT, "--steps", "2", "--address", cluster.address, "--name", name)
    code, _, errors = place.run(*command, "--keep")
    assert errors == ""
    assert code == 0
    async with RayReplayBuffer.connect(name) as buffer:
        line = (await buffer.ledger())["add"]
    assert (line["trained"], line["in_flight"], line["leased"]) == (48, 0, 0)

    code, _, errors = place.run(*command)
    assert code == 1
    assert errors.startswith(f"a buffer '{name}' already exists in this cluster")
    assert "Traceback" not in errors
    RayReplayBuffer.destroy(name)
    code, _, errors = place.run(*command, "--storage", "tape")
    assert code == 1
    assert errors.startswith("unknown storage 'tape'; expected")
    assert "Traceback" not in errors
    assert place.left() == []


def test_an_address_where_no_ray_is_is_told_at_once(place: Place) -> None:
    code, output, errors = place.run("-m", "ray_grpo.run", "--address", "127.0.0.1:1")
    assert (code, output) == (1, "")
    assert errors.startswith("no Ray at 127.0.0.1:1: ")
    assert "Traceback" not in errors


# --- the demo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engines", "steps"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_the_demo_on_ray_reaches_the_same_reward(
    place: Place, tmp_path: Path, engines: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On-policy, a completion depends on weights, prompt and seed only: where it is generated changes nothing."""
    command = ("demo", "--mode", "in_turns", "--steps", str(steps), "--tasks", "add", "--runs", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds to it
    plain = CliRunner().invoke(main, [*command, "--name", "here"])  # in this process, which has torch already
    assert plain.exit_code == 0, plain.output
    options = ("--name", "on-ray", "--ray", "--engines", str(engines))
    code, output, errors = place.run("-m", "forebay", *command, *options)
    assert errors == ""
    assert code == 0
    assert "It is closed" in output
    here, on_ray = (_rewards(tmp_path / name) for name in ("here", "on-ray"))
    assert len(here) == steps
    assert on_ray == pytest.approx(here, rel=1e-9)  # sums are made in the order in which groups come
    assert place.left() == []


def _rewards(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return [reward for line in lines if "step" in line for reward in line["rewards"].values()]


# --- trajectories -------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_rank_gets_its_trajectories_saves_them_and_goes_on_with_them(
    place: Place, tmp_path: Path, resume: bool
) -> None:
    command = ("ray_trajectories.py", "--rounds", "3", "--runners", "1", "--out", str(tmp_path / "saved"))
    code, output, errors = place.run(*command)
    assert errors == ""
    assert code == 0
    returns = [float(found) for found in re.findall(r"mean return +(-[\d.]+)", output)]
    assert len(returns) == 3
    assert returns[-1] > returns[0]
    assert output.count("trajectories of each rank: 3, 3\n") == 1
    assert place.left() == []
    for rank in range(2):
        buffer = TrajectoryReplayBuffer(arrays="numpy")
        buffer.load_checkpoint(tmp_path / "saved", is_distributed=True, local_rank=rank, world_size=2)
        assert len(buffer) == 3
        assert sorted(set(buffer.sample(64)["versions"].tolist())) == [1, 2, 3]

    if not resume:  # another run of the example; that other ranks can load it is shown above
        return
    code, output, errors = place.run(*command, "--resume", "--ranks", "3", "--rounds", "1")
    assert errors == ""
    assert code == 0
    assert re.match(r"round +4 .* trajectories of each rank: 3, 3, 3\n", output), output
    assert place.left() == []


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_and_leaves_no_process_and_no_file(place: Place) -> None:
    code, _, errors = place.interrupted("ray_trajectories.py", "--rounds", "100000", after="round   2")
    assert errors == "interrupted\n"
    assert code == 130
    assert place.left() == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--ranks", "0"], "--ranks is 0"), (["--resume"], "no checkpoint"), (["--rounds", "x"], "invalid int value")],
)
def test_the_ranks_refuse_a_wrong_argument(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ray_trajectories.parse(arguments)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
