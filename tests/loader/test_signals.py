"""Signals at counted moments of a real training process, and all ways to leave its loop.

The process ends, as it should, and the next one resumes to an exact history. No batch that was being trained on counts
as trained, also if `save` is called while the process ends.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.lives import Lives, lives
from tests.loader.history import check_accounts, check_history, last_step, lines, reported

MODES = ("in_turns", "ahead")
MOMENTS = [
    "waiting:3",
    "waiting:40",
    "body:1",
    "body:2",
    "body:5",
    "loading:1",
    "loading:5",
    "save begins:1",
    "save ends:1",
    "save begins:2",
    "closing:1",
]


def url_of(storage: str, directory: Path) -> str:
    return storage if storage == "memory" else f"sqlite:///{directory / 'store.db'}"


def events_since(directory: Path, event: str) -> list[str]:
    """The events of the last process after the last one of this name."""
    found = [line.split()[0] for line in (directory / "log").read_text().splitlines()]
    return found[len(found) - found[::-1].index(event) :]


def check_end(children: Lives, directory: Path, storage: str, mode: str) -> None:
    """Another process resumes, and trains on; then the history is exact."""
    assert children.exit_code(directory, url_of(storage, directory), mode) == 0
    check_accounts(reported(directory), check_history(directory, last_step(directory)))


def run_through(
    directory: Path, storage: str, mode: str, moments: list[str], how: str, code: int, *options: str
) -> None:
    """One process after the other, each of which ends in this way at its moment; then one that ends well."""
    with lives("tests.loader.signals_child", whole=True) as children:
        for number, moment in enumerate(moments, start=1):
            words = (directory, url_of(storage, directory), mode, moment, how, *options)
            assert children.exit_code(*words) == code, moment
            assert len(lines(directory, "moment")) == number, f"{moment} was not reached"
            if "stop_on" in options:
                after = events_since(directory, "moment")
                assert after[-1] == "ended", moment
                # A batch may be complete before the signal is noticed; that one is then the current batch.
                assert after.count("training") <= moment.startswith("waiting"), f"{moment}: the loop did not end"
                assert after.count("trained") == after.count("training") + moment.startswith("body"), moment
        check_end(children, directory, storage, mode)


def each_in(*fast: tuple[str, str]) -> pytest.MarkDecorator:
    """Both storages in both modes; all but these under `slow`."""
    pairs = [(storage, mode) for storage in ("memory", "sqlite") for mode in MODES]
    marked = [pytest.param(*pair, marks=() if pair in fast else pytest.mark.slow) for pair in pairs]
    return pytest.mark.parametrize(("storage", "mode"), marked)


@each_in(("memory", "ahead"), ("sqlite", "in_turns"))
def test_ctrl_c_ends_the_process_and_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], storage: str, mode: str
) -> None:
    run_through(tmp_path, storage, mode, MOMENTS, "SIGINT", -signal.SIGINT)
    ends = [line for line in capfd.readouterr().err.splitlines() if line.startswith("KeyboardInterrupt")]
    assert len(ends) >= len(MOMENTS)


@each_in(("sqlite", "ahead"))
def test_sigterm_kills_a_process_that_did_not_ask_for_it(tmp_path: Path, storage: str, mode: str) -> None:
    run_through(tmp_path, storage, mode, ["waiting:3", "loading:1", "closing:1"], "SIGTERM", -signal.SIGTERM)


@each_in(("memory", "ahead"), ("sqlite", "in_turns"))
def test_sigterm_ends_the_loop_after_the_current_batch(tmp_path: Path, storage: str, mode: str) -> None:
    run_through(tmp_path, storage, mode, MOMENTS, "SIGTERM", 0, "stop_on")


@each_in(("memory", "in_turns"), ("sqlite", "ahead"))
def test_leaving_the_body_ends_the_process_and_loses_nothing(tmp_path: Path, storage: str, mode: str) -> None:
    with lives("tests.loader.signals_child", whole=True) as children:
        for how, code in (("break", 0), ("return", 0), ("exception", 1), ("exit", 3)):
            for moment in ("body:1", "body:5"):
                assert children.exit_code(tmp_path, url_of(storage, tmp_path), mode, moment, how) == code, how
        assert len(lines(tmp_path, "moment")) == 8
        check_end(children, tmp_path, storage, mode)


@each_in(("memory", "in_turns"), ("sqlite", "ahead"))
def test_a_save_in_finally_works_or_is_refused_and_counts_no_half_trained_batch(
    tmp_path: Path, storage: str, mode: str
) -> None:
    moments = ["body:4", "body:5", *MOMENTS[:-1]]  # in the first life, step 3 was saved
    run_through(tmp_path, storage, mode, moments, "SIGINT", -signal.SIGINT, "save in finally")
    assert lines(tmp_path, "saved_again")[0] == ["saved_again", "3"], "step 4 was not trained"
    assert lines(tmp_path, "refused"), "no save was refused after later batches were acknowledged"
    assert not lines(tmp_path, "error:")
