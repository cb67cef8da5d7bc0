"""The demo: it learns for real, its report stands alone, and its account tells when something is missing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forebay.cli import main
from tests.processes import ROOT, finished, started

sys.path.insert(0, str(ROOT / "examples"))

import openai_server.train
import tiny_grpo.run
from tiny_grpo.demo import audit, read_story, summarise
from tiny_grpo.model import Policy
from tiny_grpo.report import Curve, SampledGroup, StepRecord, chart, report, reward_chart
from tiny_grpo.run import Outcome, Settings
from tiny_grpo.warm_start import warm_start


@pytest.fixture
def forebay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`forebay demo` in a directory of its own; in this process, which has torch already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds to it
    return lambda *arguments: CliRunner().invoke(main, ["demo", *arguments])


@pytest.fixture
def short_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any: nothing here depends on what the policy can do."""

    def short(policy: Policy, task_names: Sequence[str], *, steps: int, seed: int) -> None:
        warm_start(policy, task_names, steps=2, seed=seed)

    monkeypatch.setattr(tiny_grpo.run, "warm_start", short)


# --- the real thing, short ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_demo_trains_reports_and_closes_its_ledger(tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--save-every", "2", "--mode", "in_turns")
    result = finished("-m", "forebay", "demo", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_reported(tmp_path / "runs" / "demo-1", result.stdout)


@pytest.mark.usefixtures("short_warm_start")
def test_a_demo_goes_on_where_it_was(tmp_path: Path, forebay: Callable[..., Result]) -> None:
    first = forebay("--steps", "2", "--save-every", "1", "--tasks", "add", "--mode", "in_turns")
    assert first.exit_code == 0, first.output
    assert_reported(tmp_path / "runs" / "demo-1", first.stdout)
    second = forebay("--steps", "4", "--save-every", "2", "--tasks", "add", "--resume")
    assert second.exit_code == 0, second.output
    _, steps = read_story(tmp_path / "runs" / "demo-1")
    assert sorted(steps) == [1, 2, 3, 4]
    assert audit(tmp_path / "runs" / "demo-1") == []


def assert_reported(directory: Path, output: str) -> None:
    assert "supervised warm start" in output
    assert "prompts that it was never trained on: add 0." in output
    assert "It is closed" in output
    assert audit(directory) == []
    page = (directory / "report.html").read_text()
    assert "Mean reward by task" in page
    assert (directory / "reward.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("kills", "steps", "tasks"), [(1, 4, "add"), pytest.param(2, 10, "add,sort", marks=pytest.mark.slow)]
)
def test_a_demo_that_is_killed_skips_nothing_and_trains_nothing_twice(
    forebay: Callable[..., Result], kills: int, steps: int, tasks: str
) -> None:
    result = forebay(
        "--crash-test", "--kills", str(kills), "--steps", str(steps), "--save-every", "3", "--tasks", tasks
    )
    assert result.exit_code == 0, result.output
    assert f"kill {kills}: at step" in result.stdout
    assert "none was skipped, none trained twice" in result.stdout


async def test_the_same_trainer_learns_from_an_openai_compatible_server_in_another_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, little in (("BATCH", 3), ("SAMPLES", 2), ("WARM_START_STEPS", 2)):
        assert little < getattr(openai_server.train, name)
        monkeypatch.setattr(openai_server.train, name, little)
    with started("-m", "openai_server.server", "--port", "0", cwd=ROOT / "examples") as server:
        assert server.stdout is not None
        await openai_server.train.train(server.stdout.readline().strip(), steps=3, seed=0)
    output = capsys.readouterr().out
    assert output.count(", closed: ") == 3
    assert "step    3   mean reward" in output


@pytest.mark.slow
def test_the_trainer_of_an_openai_compatible_server_runs_by_itself() -> None:
    result = finished("-m", "openai_server.train", "--steps", "3", cwd=ROOT / "examples")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(", closed: ") == 3
    assert "Traceback" not in result.stderr


# --- wrong arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "0"], "0 is not in the range"),
        (["--tasks", "fly"], "expected some of"),
        (["--storage", "tape"], "'tape' is not one of"),
        (["--name", "../elsewhere"], "not a plain directory name"),
        (["--resume"], "there is no run to resume"),
        (["--engines", "2"], "--engines needs --ray"),
        (["--ray", "--engines", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_argument_is_refused_and_named(
    forebay: Callable[..., Result], arguments: list[str], problem: str
) -> None:
    result = forebay(*arguments)
    assert isinstance(result.exception, SystemExit)  # no other one: that would be a traceback
    assert result.exit_code in (1, 2)
    assert problem in result.stderr


def test_ray_is_needed_for_ray_only_and_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    without_ray = "import sys; sys.modules['ray'] = None; from forebay.cli import main; main(['demo', '--ray'])"
    result = finished("-c", without_ray, cwd=tmp_path)
    assert result.returncode == 1
    assert "pip install 'forebay[ray]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_is_stopped_before_its_first_step_still_sums_up(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    said: list[str] = []
    nothing = Outcome(last_step=0, ledger={}, reasons={}, held={}, records=[])
    summarise(Settings(out=tmp_path, steps=9, tasks=("add",)), nothing, said.append)
    assert said[-1] == "stopped at step 0 of 9; continue with --resume"


# --- the account --------------------------------------------------------------------------------------


def account(directory: Path, trained: list[dict[str, list[int]]], line: dict[str, int], held: list[int]) -> list[str]:
    rows = [{"step": step, "trained": groups} for step, groups in enumerate(trained, 1)]
    (directory / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {"filtered": 0, "failed": 0, "discarded": 0, **line}
    outcome = {"last_step": len(trained), "ledger": {"add": whole}, "held": {"add": held}}
    (directory / "outcome.json").write_text(json.dumps(outcome))
    return audit(directory)


def test_the_account_finds_what_is_missing_or_twice(tmp_path: Path) -> None:
    assert account(tmp_path, [{"add": [0, 1]}, {"add": [2]}], {"issued": 4, "trained": 3}, [3]) == []
    assert any("missing: [3]" in it for it in account(tmp_path, [{"add": [0, 1, 2]}], {"issued": 4, "trained": 3}, []))
    assert any(
        "trained twice: [1]" in it
        for it in account(tmp_path, [{"add": [0, 1]}, {"add": [1]}], {"issued": 3, "trained": 3}, [])
    )
    assert any("still held" in it for it in account(tmp_path, [{"add": [0]}], {"issued": 1, "trained": 1}, [0]))
    assert any("in the ledger" in it for it in account(tmp_path, [{"add": [0]}], {"issued": 2, "trained": 2}, [1]))


def test_a_resumed_run_forgets_the_steps_that_its_weights_do_not_know(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "life": 1} for step in (1, 2, 3, 4)]
    rows += [{"step": 3, "life": 2}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "li')
    _, steps = read_story(tmp_path)
    assert {step: line["life"] for step, line in steps.items()} == {1: 1, 2: 1, 3: 2}


# --- the report ---------------------------------------------------------------------------------------


def records(count: int) -> list[StepRecord]:
    shown = SampledGroup("add", 1, "1+1=", "2", [("2", 1.0), ("<script>alert(1)</script>", 0.0)])
    return [
        StepRecord(
            step=step,
            reward={"add": min(1.0, step / 20), "sort": 0.5},
            staleness=0.5,
            length={"add": 2.0, "sort": 5.0},
            tokens_per_s=1_000.0 + step,
            seconds=0.5,
            in_flight=3,
            groups=(shown,) if step == 1 else (),
        )
        for step in range(1, count + 1)
    ]


class Tags(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_stands_alone_and_shows_text_as_text() -> None:
    ledger = {"add": {"issued": 3, "in_flight": 0, "buffered": 1, "leased": 0, "trained": 2}}
    page = report("a run", records(30), ledger, {"add": {"zero_std": 1}}, {"seed": "0"})
    tags = Tags()
    tags.feed(page)
    assert tags.names.count("svg") == 4
    assert "script" not in tags.names
    assert tags.links == []
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "closed" in page


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_a_chart_can_be_drawn_of_any_number_of_steps(count: int) -> None:
    drawn = reward_chart(records(count), standalone=True)
    assert drawn.count("<polyline") == (2 if count else 0)
    assert "nan" not in drawn
    numbers = [float(number) for number in re.findall(r'c[xy]="([-0-9.]+)"', drawn)]
    assert all(0 <= number <= 640 for number in numbers)


def test_a_chart_leaves_out_what_is_no_number() -> None:
    drawn = chart("x", "", [Curve("a", [(1, 1.0), (2, float("nan")), (3, 2.0)])])
    assert drawn.count("<circle") == 2
