"""What becomes of the members of a group around one attempt to generate them. Pure.

Before: `prepare` makes what the agent loop gets. After: `collect` holds what it returned against what was issued,
member by member, so that one bad answer costs that member and not its siblings; `settle_tries` counts the failures.

The status decides what a member is, never its finish reason. COMPLETED members are kept as they are. A member that is
`unjudged` is answered, too: it waits only for its reward. Only an ABORTED one with a response may be continued; every
other starts from its prompt as issued, whatever it carries. The samples of one rollout (its segments) share one fate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from forebay.agent_loop.base import failed_member
from forebay.core.issued import is_as_issued
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
from forebay.core.validate import check_group
from forebay.errors import InvalidGroup, InvalidInput
from forebay.prompts.records import independent

__all__ = [
    "collect",
    "is_answered",
    "leave_unjudged",
    "new_rewards",
    "new_tokens",
    "prepare",
    "refused_members",
    "settle_tries",
    "untrusted_responses",
]


def is_answered(state: RolloutState) -> bool:
    """Whether nothing of a sample is left to generate."""
    return state.status is Status.COMPLETED or (state.status is Status.ABORTED and state.unjudged)


def leave_unjudged(state: RolloutState) -> None:
    """Keep an answered sample for judging on its retry: drawn again like a stopped one, never generated again."""
    state.status, state.unjudged = Status.ABORTED, True


def untrusted_responses(group: Sequence[RolloutState]) -> int:
    """How many members carry a response that nobody generated for them: those start from their prompt."""
    return sum(state.status in (Status.INIT, Status.EXPIRED) and carries_response(state) for state in group)


def prepare(group: Sequence[RolloutState], *, partial: bool) -> tuple[list[RolloutState], list[RolloutState]]:
    """What was issued, to be kept as it is, and the members for the agent loop, which are its own."""
    issued: list[RolloutState] = []
    for samples in _rollouts(group):
        if all(is_answered(state) for state in samples):
            for state in samples:
                state.status, state.unjudged, state.error_msg = Status.COMPLETED, False, None
            issued += samples
            continue
        state = min(samples, key=lambda sample: sample.segment)
        continues = partial and len(samples) == 1 and state.status is Status.ABORTED and carries_response(state)
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
) -> list[RolloutState]:
    """The members after an attempt, each COMPLETED, ABORTED, FILTERED or FAILED with its error.

    `missing`: why there is no answer for members that were not returned or have no status; None is the agent loop's
    own fault. `stopped`: the attempt was stopped from outside, which is nobody's fault: those are ABORTED as they were.
    """
    answers: dict[int | None, list[RolloutState]] = {}
    for state in returned if isinstance(returned, (list, tuple)) else ():
        if isinstance(state, RolloutState) and isinstance(state.rollout_id, (int, np.integer)):
            answers.setdefault(int(state.rollout_id), []).append(state)
    members: list[RolloutState] = []
    sound = _is_sound([state for states in answers.values() for state in states], issued[0])
    for prompts in _rollouts(issued):
        given = answers.get(prompts[0].rollout_id, ())
        if all(prompt.status is Status.COMPLETED for prompt in prompts):
            members += prompts  # kept as they were: the loop had nothing to do with them
        elif stopped and not given:
            members.append(_stopped(prompts[0].__copy__(), prompts[0], partial))
        else:
            members += _answered(prompts[0], given, partial, missing, sound)
    return members


def _answered(
    prompt: RolloutState, answers: Sequence[RolloutState], partial: bool, missing: str | None, sound: bool
) -> list[RolloutState]:
    problem = None if sound and answers else _problem(prompt, answers)
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
            answer.version_spans = prompt.version_spans  # built by the loop, with tokens of older weights in front
    failed = next((answer for answer in answers if answer.status is Status.FAILED), None)
    if failed is not None:
        return [failed_member(prompt, failed.error_msg or f"the engine ended with {failed.finish_reason!r}")]
    if any(answer.status is Status.ABORTED for answer in answers):
        # Segments collapse to the one that was issued: half a trace cannot be continued.
        return [_stopped(answers[0] if len(answers) == 1 else None, prompt, partial)]
    return list(answers)


def _stopped(kept: RolloutState | None, prompt: RolloutState, partial: bool) -> RolloutState:
    """A member that has to be drawn again, with the tokens that it has if it can continue from them."""
    if kept is None or not partial or not carries_response(kept):
        kept = reset_response(prompt)
    kept.status = Status.ABORTED
    return kept


def _keep_prompt(answer: RolloutState, prompt: RolloutState) -> None:
    """What a sample that the loop built itself lacks of its prompt: rewards and trainers look for it there.

    One that the loop was given has all of it; what is not there was taken out.
    """
    for name in (*PROMPT_FIELDS, "sample_params", "session_id"):
        if getattr(answer, name) is None:
            setattr(answer, name, getattr(prompt, name))
    for name in prompt.extra_fields.keys() - answer.extra_fields.keys():
        answer.extra_fields[name] = prompt.extra_fields[name]


def _continues(answer: RolloutState, prompt: RolloutState) -> bool:
    """Whether a response begins with the tokens that there were before."""
    before, after = prompt.response_ids, answer.response_ids
    return before is not None and after is not None and list(after[: len(before)]) == list(before)


def _is_sound(answers: Sequence[RolloutState], prompt: RolloutState) -> bool:
    """Whether nothing is wrong with any answer, looked at together: that is cheaper, and nearly always so."""
    return bool(answers) and _problem(prompt, answers) is None


def _problem(prompt: RolloutState, answers: Sequence[RolloutState]) -> str | None:
    """What is wrong with the answers to one member, or None."""
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
                raise InvalidGroup("the agent loop returned it as completed, but without a token")
            if answer.reward is not None:
                group_reward((answer,))
        check_group(answers, prompt.task_name or "")
    except (InvalidGroup, TypeError, ValueError, AttributeError) as error:
        return str(error)
    return None


_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.FAILED, Status.FILTERED, Status.INIT)


def settle_tries(
    members: Sequence[RolloutState],
    issued: Sequence[RolloutState],
    max_tries: int,
    *,
    spend: bool = True,
    aborted: str | None = None,
) -> str | None:
    """Count a try for every member that failed; back to ABORTED while it has tries left. The last error, if any.

    Not `spend`: it was stopped from outside, which costs nothing. `aborted`: why members that were interrupted spend a
    try as well; they keep what they have.
    """
    tries = {state.rollout_id: state.num_tries for state in issued}
    last = None
    for state in members:
        interrupted = aborted is not None and state.status is Status.ABORTED and not state.unjudged
        if state.status is not Status.FAILED and not interrupted:
            continue
        state.num_tries = tries[state.rollout_id] + (1 if spend else 0)
        if interrupted:
            state.error_msg = aborted
        last = state.error_msg or "failed"
        if not spend:
            state.error_msg = None
        state.status = Status.ABORTED if state.num_tries < max_tries else Status.FAILED
        if state.status is Status.ABORTED:
            state.finish_reason = None
    return last


def refused_members(
    members: Sequence[RolloutState], issued: Sequence[RolloutState], error: str, *, everyone: bool
) -> list[RolloutState]:
    """The members of a group that cannot be stored: those that are to blame (or everyone) FAILED, the others kept."""
    from forebay.codec.frame import encode_group  # imported here: only what is refused needs it

    kept: list[RolloutState] = []
    for rollout_id in dict.fromkeys(state.rollout_id for state in issued):
        samples = [state for state in members if state.rollout_id == rollout_id]
        try:
            if everyone:
                raise InvalidInput(error)
            group_reward(samples)
            encode_group(samples, [])  # references are no fault
            kept += samples
        except InvalidInput:
            prompt = next(state for state in issued if state.rollout_id == rollout_id)
            kept.append(failed_member(prompt, error))
    return kept


def new_tokens(members: Sequence[RolloutState], issued: Sequence[RolloutState]) -> int:
    """How many tokens an attempt brought; what it took away from a member that failed does not count."""
    tokens: dict[int | None, int] = {}
    for state in members:
        tokens[state.rollout_id] = tokens.get(state.rollout_id, 0) + versioned_tokens(state)
    for state in issued:
        tokens[state.rollout_id] = tokens.get(state.rollout_id, 0) - versioned_tokens(state)
    return sum(max(0, new) for new in tokens.values())


def new_rewards(members: Sequence[RolloutState], rewarded: Collection[tuple[int | None, int]]) -> list[float]:
    """The scores of the members that had none before."""
    return [
        float(state.reward["score"])
        for state in members
        if (state.rollout_id, state.segment) not in rewarded
        and isinstance(state.reward, dict)
        and state.reward.get("score") is not None
    ]
