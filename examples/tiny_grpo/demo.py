"""What `forebay demo` does around `run`: a bar, a log of every step, a report, and a test that kills it.

A run has its own directory: `steps.jsonl` (a line per step, written before the step's checkpoint, so that the log of a
resumed run is complete), the checkpoints, and in the end `report.html` and `reward.svg`. Every step is logged with the
groups that it was trained on; the last line for a step is the one that the weights were trained on.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay import AsyncBatch, AsyncRolloutLoader
from tiny_grpo import report
from tiny_grpo.report import SampledGroup
from tiny_grpo.run import Outcome, Settings, StepRecord, WarmStart, run

__all__ = ["Story", "audit", "crash_test", "demo"]

Say = Callable[[str], None]

_STEPS, _OUTCOME = "steps.jsonl", "outcome.json"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Story:
    """The log of a run, and what is shown of it."""

    def __init__(self, directory: Path, steps: int, say: Say, *, terminal: bool) -> None:
        self.directory = directory
        self.steps = steps
        self._say = say
        self._terminal = terminal
        self._began = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        self._log = (directory / _STEPS).open("a", encoding="utf-8")

    def close(self) -> None:
        self._log.close()

    def warm_start(self, warmed: WarmStart) -> None:
        rewards = ", ".join(f"{name} {reward:.2f}" for name, reward in warmed.rewards.items())
        self._say(f"supervised warm start: {warmed.steps} steps in {warmed.seconds:.1f} s; rewards now: {rewards}")
        self._write({"warm_start": asdict(warmed)})

    def step(self, record: StepRecord, batch: AsyncBatch) -> None:
        """Log a step that was trained, and show how far it is."""
        line: dict[str, Any] = asdict(record)
        line["trained"] = {
            name: [group[0].group_id for group in groups] for name, groups in batch.groups_by_task.items()
        }
        if record.step in (1, self.steps // 2, self.steps):
            line["shown"] = [asdict(sampled) for sampled in _sampled(record.step, batch)]
        self._write(line)
        rewards = "  ".join(f"{name} {reward:.2f}" for name, reward in record.rewards.items())
        text = f"reward  {rewards}   staleness {record.staleness:.2f}   {record.in_flight} in flight"
        if self._terminal:
            filled = 20 * record.step // self.steps
            bar = "#" * filled + "." * (20 - filled)
            sys.stderr.write(f"\r[{bar}] step {record.step}/{self.steps}   {text} ")
            sys.stderr.flush()
        elif record.step % 10 == 0 or record.step == self.steps:
            self._say(f"step {record.step:>4}/{self.steps}   {text}   {time.monotonic() - self._began:.0f} s")

    def _write(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


def _sampled(step: int, batch: AsyncBatch) -> list[SampledGroup]:
    """One group of every task, to look at."""
    sampled = []
    for name, groups in batch.groups_by_task.items():
        if groups:
            first = groups[0][0]
            prompt = str(first.message[-1]["content"])
            answers = [(state.response or "", float((state.reward or {}).get("score", 0.0))) for state in groups[0]]
            sampled.append(SampledGroup(name, step, prompt, str(first.extra_fields["answer"]), answers))
    return sampled


def read_story(directory: Path) -> tuple[dict[str, Any] | None, dict[int, dict[str, Any]]]:
    """The warm start and the steps of a run, as the last weights know them."""
    warmed: dict[str, Any] | None = None
    steps: dict[int, dict[str, Any]] = {}
    for text in (directory / _STEPS).read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # it was killed while it wrote this
        if "warm_start" in line:
            warmed = line["warm_start"]
        else:
            # A step that comes again was resumed before: what followed it is forgotten with those weights.
            steps = {number: known for number, known in steps.items() if number < line["step"]}
            steps[line["step"]] = line
    return warmed, steps


async def demo(settings: Settings, say: Say, *, terminal: bool) -> Outcome:
    """Run it, show it, and write a report. Ctrl-C and SIGTERM end it after the current step, with a checkpoint."""
    assert settings.out is not None
    story = Story(settings.out, settings.steps, say, terminal=terminal)
    loop = asyncio.get_running_loop()
    began = time.monotonic()

    def stop_on_signals(loader: AsyncRolloutLoader) -> None:
        def stop() -> None:
            remove_handlers()  # the second signal ends it at once
            say("\nstopping after this step; the run can be resumed")
            loader.stop()

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, stop)

    def remove_handlers() -> None:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)

    try:
        outcome = await run(settings, on_open=stop_on_signals, on_warm_start=story.warm_start, on_step=story.step)
    finally:
        remove_handlers()
        story.close()
    if terminal:
        say("")
    (settings.out / _OUTCOME).write_text(
        json.dumps({"last_step": outcome.last_step, "ledger": outcome.ledger, "held": outcome.held})
    )
    write_report(settings, outcome, time.monotonic() - began)
    summarise(settings, outcome, say)
    return outcome


def summarise(settings: Settings, outcome: Outcome, say: Say) -> None:
    """Rewards at the beginning and at the end, and the ledger."""
    assert settings.out is not None
    warmed, steps = read_story(settings.out)
    ordered = [steps[number]["rewards"] for number in sorted(steps)]
    say(f"\n{'mean reward':<14}{'first ten steps':>16}{'last ten':>10}")
    for name in settings.tasks:
        first, last = (_mean([rewards[name] for rewards in part]) for part in (ordered[:10], ordered[-10:]))
        say(f"{name:<14}{first:>16.2f}{last:>10.2f}")
    if outcome.evaluated:
        before = {} if warmed is None else warmed["rewards"]
        said = ", ".join(
            f"{name} {before.get(name, math.nan):.2f} -> {now:.2f}" for name, now in outcome.evaluated.items()
        )
        say(f"\nprompts that it was never trained on: {said}")
    columns = list(next(iter(outcome.ledger.values()), ()))  # none, if it was stopped before a prompt was drawn
    say("\nThe ledger, in groups:\n" + " " * 10 + "".join(f"{column:>11}" for column in columns))
    for name, line in outcome.ledger.items():
        say(f"{name:<10}" + "".join(f"{line[column]:>11}" for column in columns))
    closed = all(line["issued"] == sum(line.values()) - line["issued"] for line in outcome.ledger.values())
    say("It is closed: issued is the sum of all the others." if closed else "THE LEDGER IS OPEN")
    say(f"\nreport: {settings.out / 'report.html'}")
    if outcome.last_step < settings.steps:
        say(f"stopped at step {outcome.last_step} of {settings.steps}; continue with --resume")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def write_report(settings: Settings, outcome: Outcome, seconds: float, notes: tuple[str, ...] = ()) -> None:
    """`report.html` and `reward.svg` in the run's directory."""
    assert settings.out is not None
    warmed, steps = read_story(settings.out)
    records = [
        report.StepRecord(
            step=number,
            reward=line["rewards"],
            staleness=line["staleness"],
            length=line["lengths"],
            tokens_per_s=line["tokens_per_s"],
            seconds=line["seconds"],
            in_flight=line["in_flight"],
            groups=[
                SampledGroup(**{**shown, "responses": [(text, score) for text, score in shown["responses"]]})
                for shown in line.get("shown", ())
            ],
        )
        for number, line in sorted(steps.items())
    ]
    if warmed is not None:
        rewards = ", ".join(f"{name} {reward:.2f}" for name, reward in warmed["rewards"].items())
        notes = (f"Supervised warm start: {warmed['steps']} steps; rewards after it: {rewards}.", *notes)
    facts = {
        "mode": "in turns, on-policy" if settings.mode == "in_turns" else "running ahead",
        "engines": f"{settings.engine_actors} in actors on Ray" if settings.engine_actors else "one, in this process",
        "storage": settings.storage,
        "seed": str(settings.seed),
        "steps": f"{outcome.last_step} of {settings.groups_per_step} groups of {settings.samples_per_group}",
        "wall time": f"{seconds:.0f} s",
    }
    page = report.report(
        f"forebay demo: {settings.out.name}", records, outcome.ledger, outcome.reasons, facts, notes=notes
    )
    (settings.out / "report.html").write_text(page, encoding="utf-8")
    (settings.out / "reward.svg").write_text(report.reward_chart(records, standalone=True), encoding="utf-8")


# --- the crash test -----------------------------------------------------------------------------------


def audit(directory: Path) -> list[str]:
    """What is wrong with the account of a finished run: prompts skipped, or trained twice. Empty: nothing is."""
    _, steps = read_story(directory)
    outcome = json.loads((directory / _OUTCOME).read_text())
    problems = []
    missing = set(range(1, outcome["last_step"] + 1)) - set(steps)
    if missing:
        problems.append(f"steps without a record: {sorted(missing)}")
    for name, line in outcome["ledger"].items():
        trained = [group for number in sorted(steps) for group in steps[number]["trained"].get(name, ())]
        held = outcome["held"].get(name, [])
        twice = sorted({group for group in trained if trained.count(group) > 1})
        ended = line["filtered"] + line["failed"] + line["discarded"]
        if twice:
            problems.append(f"{name}: trained twice: {twice}")
        if set(trained) & set(held):
            problems.append(f"{name}: trained, and still held: {sorted(set(trained) & set(held))}")
        if line["trained"] != len(trained):
            problems.append(f"{name}: {len(trained)} groups in the log, {line['trained']} in the ledger")
        if len(trained) + len(held) + ended != line["issued"]:
            skipped = sorted(set(range(line["issued"])) - set(trained) - set(held))
            problems.append(f"{name}: of {line['issued']} prompts drawn these are missing: {skipped}")
    return problems


def crash_test(settings: Settings, kills: int, say: Say) -> bool:
    """Kill the training process at random moments, resume it each time; whether its account is whole in the end."""
    place = "/tmp" if Path("/tmp").is_dir() else None  # a short path, see ray_cluster
    with tempfile.TemporaryDirectory(prefix="fb-", dir=place, ignore_cleanup_errors=True) as files:
        # A Ray that dies with its process leaves its files behind: they go to where they can be removed.
        return _kill_and_resume(settings, kills, say, os.environ | {"RAY_TMPDIR": files})


def _kill_and_resume(settings: Settings, kills: int, say: Say, environment: Mapping[str, str]) -> bool:
    assert settings.out is not None
    chance = random.Random(settings.seed)
    command = [
        *(sys.executable, "-m", "forebay", "demo", "--storage", settings.storage, "--seed", str(settings.seed)),
        *("--steps", str(settings.steps), "--tasks", ",".join(settings.tasks), "--mode", settings.mode),
        *("--runs", str(settings.out.parent), "--name", settings.out.name, "--save-every", str(settings.save_every)),
        *(["--ray", "--engines", str(settings.engine_actors)] if settings.engine_actors else []),
    ]
    for kill in range(1, kills + 1):
        reached = _last_step(settings.out)
        child = subprocess.Popen(
            [*command, *(["--resume"] if reached is not None else [])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        goal = (reached or 0) + chance.randint(1, max(2, settings.steps // (kills + 1)))
        while child.poll() is None and (_last_step(settings.out) or 0) < min(goal, settings.steps - 1):
            time.sleep(0.02)
        time.sleep(chance.random() * 0.5)
        if child.poll() is not None:
            _, error = child.communicate()
            if child.returncode:
                say(f"the training process failed by itself:\n{error}")
                return False
            break
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        say(f"kill {kill}: at step {_last_step(settings.out)} of {settings.steps}; resuming from the last checkpoint")
    finished = subprocess.run([*command, "--resume"], check=False, capture_output=True, text=True, env=environment)
    if finished.returncode:
        say(f"the last run failed:\n{finished.stderr}")
        return False
    say(finished.stdout.rstrip())
    problems = audit(settings.out)
    for problem in problems:
        say(f"WRONG: {problem}")
    if not problems:
        say(f"\nAfter {kills} kills: every prompt that was drawn is found once; none was skipped, none trained twice.")
    return not problems


def _last_step(directory: Path) -> int | None:
    if not (directory / _STEPS).exists():
        return None
    _, steps = read_story(directory)
    return max(steps, default=0)
