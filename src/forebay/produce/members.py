"""The members of a group before and after one attempt to generate them. Pure.

Before an attempt, `prepare` makes the members that the agent loop gets. Afterwards, `collect` compares the members that
it returned with those that were issued, one by one, so that one bad answer costs that member only; `settle_tries`
counts the failures.

The status decides, never the finish reason. COMPLETED members are kept unchanged. An `unjudged` member is answered,
too: only its reward is missing. Only an ABORTED member with a response may be continued; all others start from their
prompt as issued, whatever they contain. The samples of one rollout (its segments) are treated as one.

The values of every answer are checked once, column by column: token ids from 0, logprobs up to 0, masks of 0 and 1,
existing versions. A trainer would compute with other values without noticing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from forebay.agent_loop.base import failed_member
from forebay.core.payload import is_as_issued
from forebay.core.rollout import (
    PROMPT_FIELDS,
    RolloutState,
    Status,
    carries_response,
    group_reward,
    lacks_tokens,
    reset_response,
    versioned_tokens,
)
from forebay.core.staleness import is_newer
from forebay.core.validate import check_group
from forebay.errors import InvalidGroup, InvalidInput
from forebay.prompts.sources import independent


def is_answered(state: RolloutState) -> bool:
    """Whether a sample is completely generated."""
    return state.status is Status.COMPLETED or (state.status is Status.ABORTED and state.unjudged)


def set_aside(members: Sequence[RolloutState]) -> None:
    """Keep answered members for judging on their retry: they are drawn again as ABORTED, and not generated again."""
    for state in members:
        if is_answered(state):
            state.status, state.unjudged = Status.ABORTED, True


def fail_judging(members: Sequence[RolloutState], error: str, max_tries: int, *, rewarded: bool) -> str:
    """Judging was given up: members that are not judged spend a try and wait for a retry. Returns the error.

    `rewarded`: all members have their rewards, and a later step failed.
    """
    for state in members:
        if is_answered(state) and (rewarded or state.reward is None):
            state.num_tries += 1
            state.status = Status.FAILED if state.num_tries >= max_tries else Status.ABORTED
            state.unjudged, state.error_msg = True, error
    return error


def untrusted_responses(group: Sequence[RolloutState]) -> int:
    """The number of members with a response that was not generated for them; they start from their prompt."""
    return sum(state.status in (Status.INIT, Status.EXPIRED) and carries_response(state) for state in group)


def prepare(
    group: Sequence[RolloutState], *, partial: bool, model_step: int | None = None
) -> tuple[list[RolloutState], list[RolloutState]]:
    """The members as issued, which must not be changed, and copies for the agent loop.

    `model_step`: the step of the weights that generate now. Tokens of later weights, which were lost when the run was
    resumed, are generated again. Without partial rollout a member continues only if all of its tokens are from these
    weights: an outage of the engine interrupted it.
    """
    issued: list[RolloutState] = []
    for samples in _rollouts(group):
        lost = model_step is not None and any(is_newer(state, model_step) for state in samples)
        if all(is_answered(state) for state in samples) and not lost:
            for state in samples:
                state.status, state.unjudged, state.error_msg = Status.COMPLETED, False, None
            issued += samples
            continue
        state = min(samples, key=lambda sample: sample.segment)
        continues = len(samples) == 1 and state.status is Status.ABORTED and carries_response(state) and not lost
        if continues and not partial:
            tokens = versioned_tokens(state)
            continues = bool(tokens) and state.version_spans == ((model_step, tokens),)
        if not continues and not is_as_issued(state):
            prompt = state.issued
            state = reset_response(state)
            state.issued = prompt
        state.status, state.finish_reason, state.error_msg, state.unjudged = Status.INIT, None, None, False
        issued.append(state)
    return issued, [independent(state.__copy__()) for state in issued]


def _rollouts(group: Sequence[RolloutState]) -> list[list[RolloutState]]:
    """The samples of each rollout."""
    rollouts: dict[int | None, list[RolloutState]] = {}
    for state in group:
        rollouts.setdefault(state.rollout_id, []).append(state)
    return list(rollouts.values())


def collect(
    issued: Sequence[RolloutState],
    returned: object,
    *,
    partial: bool,
    missing: str | None = None,
    stopped: bool = False,
    model_step: int | None = None,
) -> list[RolloutState]:
    """The members after an attempt, each COMPLETED, ABORTED, FILTERED or FAILED with its error.

    `missing`: the error of members that were not returned or have no status; by default the agent loop is at fault.
    `stopped`: the attempt was stopped from outside, so that missing members are ABORTED as they were and not FAILED.
    `model_step`: the step of the weights of the engine, if it is known.
    """
    answers: dict[int | None, list[RolloutState]] = {}
    for state in returned if isinstance(returned, (list, tuple)) else ():
        if isinstance(state, RolloutState) and isinstance(state.rollout_id, (int, np.integer)):
            answers.setdefault(int(state.rollout_id), []).append(state)
    members: list[RolloutState] = []
    every = [state for states in answers.values() for state in states]
    sound = (
        _problem(issued[0], every, model_step) is None
    )  # one check for all of them is cheaper, and nearly always passes
    for prompts in _rollouts(issued):
        given = answers.get(prompts[0].rollout_id, ())
        if all(prompt.status is Status.COMPLETED for prompt in prompts):
            members += prompts  # unchanged: the loop had nothing to generate
        elif stopped and not given:
            members.append(_stopped(prompts[0].__copy__(), prompts[0], partial))
        else:
            members += _answered(prompts[0], given, partial, missing, sound, model_step)
    return members


def stopped_members(issued: Sequence[RolloutState], returned: object, *, partial: bool) -> list[RolloutState]:
    """The members of a group that was stopped: those with an answer keep it, partial ones if they can continue."""
    for state in returned if isinstance(returned, (list, tuple)) else ():
        if isinstance(state, RolloutState) and state.status == Status.INIT:
            state.status = Status.ABORTED
    members = collect(issued, returned, partial=partial, missing="stopped", stopped=True)
    settle_tries(members, issued, spend=False)
    return members


def complete_rollouts(returned: object) -> list[RolloutState]:
    """The samples of complete rollouts. A rollout is incomplete if one of its segments is."""
    given = returned if isinstance(returned, (list, tuple)) else ()
    states = [state for state in given if isinstance(state, RolloutState)]
    incomplete = [state.rollout_id for state in states if state.status != Status.COMPLETED]
    return [state for state in states if state.rollout_id not in incomplete]


def _answered(
    prompt: RolloutState,
    answers: Sequence[RolloutState],
    partial: bool,
    missing: str | None,
    sound: bool,
    model_step: int | None,
) -> list[RolloutState]:
    problem = None if sound and answers else _problem(prompt, answers, model_step)
    if problem is None and any(answer.status is Status.INIT for answer in answers):
        problem = missing or "the agent loop returned it without a status"
    if problem is not None:
        return [failed_member(prompt, missing if missing is not None and not answers else problem)]
    for answer in answers:
        answer.task_name, answer.group_id, answer.attempt = prompt.task_name, prompt.group_id, prompt.attempt
        if answer.issued is None:
            _keep_prompt(answer, prompt)
        answer.num_tries, answer.issued, answer.unjudged = prompt.num_tries, prompt.issued, False
        if prompt.version_spans and not answer.version_spans and _continues(answer, prompt):
            answer.version_spans = prompt.version_spans  # a new sample that begins with the tokens of older weights
    failed = next((answer for answer in answers if answer.status is Status.FAILED), None)
    if failed is not None:
        return [failed_member(prompt, failed.error_msg or f"the engine ended with {failed.finish_reason!r}")]
    if any(answer.status is Status.ABORTED for answer in answers):
        # Several segments are replaced by the prompt: an incomplete trace cannot be continued.
        # A tool that the loop left running may still change the answer, so it is copied.
        kept = independent(answers[0].__copy__()) if partial and len(answers) == 1 else None
        return [_stopped(kept, prompt, partial)]
    return list(answers)


def _stopped(kept: RolloutState | None, prompt: RolloutState, partial: bool) -> RolloutState:
    """A member that has to be drawn again, with its tokens if it can be continued."""
    if kept is None or not partial or not carries_response(kept):
        kept = reset_response(prompt)
    kept.status = Status.ABORTED
    return kept


def _keep_prompt(answer: RolloutState, prompt: RolloutState) -> None:
    """Copy the missing prompt fields into a sample that the loop created: rewards and trainers need them.

    Not for samples that the loop was given: fields that they lack were removed on purpose.
    """
    for name in (*PROMPT_FIELDS, "sample_params", "session_id"):
        if getattr(answer, name) is None:
            setattr(answer, name, getattr(prompt, name))
    for name in prompt.extra_fields.keys() - answer.extra_fields.keys():
        answer.extra_fields[name] = prompt.extra_fields[name]


def _continues(answer: RolloutState, prompt: RolloutState) -> bool:
    """Whether a response begins with the earlier tokens."""
    before, after = prompt.response_ids, answer.response_ids
    return before is not None and after is not None and list(after[: len(before)]) == list(before)


def _problem(prompt: RolloutState, answers: Sequence[RolloutState], model_step: int | None) -> str | None:
    """The problem with the answers to one member, or None."""
    if not answers:
        return "the agent loop did not return it"
    try:
        for answer in answers:
            if answer.group_id is not None and answer.group_id != prompt.group_id:
                raise InvalidGroup(f"the agent loop returned it as a member of group {answer.group_id}")
            if answer.task_name is not None and answer.task_name != prompt.task_name:
                raise InvalidGroup(f"the agent loop returned it under task {answer.task_name!r}")
            answer.attempt = prompt.attempt
            if answer.status not in _STATUSES:
                raise InvalidGroup(f"the agent loop returned it as {answer.status}")
            if answer.status is Status.COMPLETED and lacks_tokens(answer):
                raise InvalidGroup("the agent loop returned it as completed, but without tokens")
            if answer.reward is not None:
                group_reward((answer,))
        check_group(answers, prompt.task_name or "")
        check_contents(answers, model_step)
    except (InvalidGroup, TypeError, ValueError, AttributeError) as error:
        return str(error)
    return None


_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.FAILED, Status.FILTERED, Status.INIT)


def settle_tries(
    members: Sequence[RolloutState],
    issued: Sequence[RolloutState],
    max_tries: int = 1,
    *,
    spend: bool = True,
    aborted: str | None = None,
) -> str | None:
    """Count a try for every member that failed; with tries left it becomes ABORTED. Returns the last error, if any.

    `spend=False`: the attempt was stopped from outside, which costs no try. `aborted`: the error of interrupted members
    that spend a try as well; they keep their tokens.
    """
    tries = {state.rollout_id: state.num_tries for state in issued}
    last = None
    for state in members:
        interrupted = aborted is not None and state.status is Status.ABORTED and not state.unjudged
        if state.status is not Status.FAILED and not interrupted:
            continue
        state.num_tries = tries[state.rollout_id] + spend
        state.error_msg = aborted if interrupted else state.error_msg
        last = state.error_msg or "failed"
        if not spend:
            state.error_msg = None
        if not spend or state.num_tries < max_tries:
            state.status, state.finish_reason = Status.ABORTED, None
        else:
            state.status = Status.FAILED
    return last


def refused_members(
    members: Sequence[RolloutState], issued: Sequence[RolloutState], error: str, *, everyone: bool
) -> list[RolloutState]:
    """The members of a group that cannot be stored: the invalid ones (or `everyone`) FAILED, the others kept."""
    from forebay.codec.frame import encode_group  # imported here because only refused groups need it

    kept: list[RolloutState] = []
    for rollout_id in dict.fromkeys(state.rollout_id for state in issued):
        samples = [state for state in members if state.rollout_id == rollout_id]
        try:
            if everyone:
                raise InvalidInput(error)
            group_reward(samples)
            encode_group(samples, [])  # references are allowed
            kept += samples
        except InvalidInput:
            prompt = next(state for state in issued if state.rollout_id == rollout_id)
            kept.append(failed_member(prompt, error))
    return kept


def new_tokens(members: Sequence[RolloutState], issued: Sequence[RolloutState]) -> int:
    """The number of tokens that an attempt added; tokens that a failed member lost are not subtracted."""
    tokens: dict[int | None, int] = {}
    for state in members:
        tokens[state.rollout_id] = tokens.get(state.rollout_id, 0) + versioned_tokens(state)
    for state in issued:
        tokens[state.rollout_id] = tokens.get(state.rollout_id, 0) - versioned_tokens(state)
    return sum(max(0, new) for new in tokens.values())


def new_rewards(members: Sequence[RolloutState], rewarded: Collection[tuple[int | None, int]]) -> list[float]:
    """The scores of the members that were rewarded for the first time."""
    return [
        float(state.reward["score"])
        for state in members
        if (state.rollout_id, state.segment) not in rewarded
        and isinstance(state.reward, dict)
        and state.reward.get("score") is not None
    ]


MOST_LOGPROB = 1e-3
"""Larger logprobs are refused. Rounding of an engine stays far below; probabilities and negated logprobs do not."""


def check_contents(answers: Sequence[RolloutState], model_step: int | None) -> None:
    """InvalidGroup if an answer contains values that no model can generate. `model_step`: the latest valid version."""
    for state in answers:
        if state.status is Status.FAILED or state.response_ids is None or not len(state.response_ids):
            continue
        if not _are_ids(state.response_ids):
            raise _refused(state, "response_ids", "token ids, which are integers from 0")
        if state.logprobs is not None and state.input_ids is None and not _are_logprobs(state.logprobs):
            raise _refused(state, "logprobs", f"numbers of at most {MOST_LOGPROB:g}, without NaN")
        if state.response_mask is not None and not _is_mask(state.response_mask):
            raise _refused(state, "response_mask", "only 0 and 1")
        if model_step is not None and state.version_spans:
            latest = max(step for step, _ in state.version_spans)
            if latest > model_step:
                raise InvalidGroup(
                    f"version_spans of {_name(state)} contain model step {latest}, but the engine has the weights of "
                    f"step {model_step}; expected no later step (a loop that takes new weights by itself has to set "
                    "takes_weights_while_running)"
                )


def _are_ids(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return column.dtype.kind in "iu" and bool(np.minimum.reduce(column) >= 0)
    return isinstance(sum(column), (int, np.integer)) and min(column) >= 0  # the sum is a float if one item is


def _are_logprobs(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return bool(np.maximum.reduce(column) <= MOST_LOGPROB)  # the maximum is NaN if an item is
    total = sum(column)
    return bool(total == total) and max(column) <= MOST_LOGPROB


def _is_mask(column: Any) -> bool:
    if not isinstance(column, np.ndarray):
        return set(column) <= {0, 1}
    return column.dtype.kind == "b" or bool(((column == 0) | (column == 1)).all())


def _refused(state: RolloutState, name: str, expected: str) -> InvalidGroup:
    """The error for a column, with its first invalid value."""
    check = {"response_ids": _are_ids, "logprobs": _are_logprobs, "response_mask": _is_mask}[name]
    column = getattr(state, name)
    at = next((index for index in range(len(column)) if not check(column[index : index + 1])), 0)
    return InvalidGroup(f"{name}[{at}] of {_name(state)} is {column[at]!s:.80}; expected {expected}")


def _name(state: RolloutState) -> str:
    return f"rollout {state.rollout_id} of group {state.group_id}"
