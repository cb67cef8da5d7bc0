"""Small groups to test with."""

from __future__ import annotations

from forebay.core.rollout import RolloutState, Status


def make_group(
    samples: int = 2,
    *,
    status: Status = Status.COMPLETED,
    tokens: int = 3,
    model_step: int | None = None,
    group_id: int | None = None,
    score: float | None = None,
    text: str = "What is 17 times 23?",
) -> list[RolloutState]:
    """A group of samples of one status; those that are INIT or EXPIRED have no response.

    >>> [str(state.status) for state in make_group(2)], make_group()[0].response_ids
    (['completed', 'completed'], [0, 1, 2])
    """
    message = [{"role": "user", "content": text}]
    generated = status not in (Status.INIT, Status.EXPIRED) and tokens > 0
    return [
        RolloutState(
            message=message,
            group_id=group_id,
            prompt_ids=[1, 2],
            response="391" if generated else None,
            response_ids=list(range(tokens)) if generated else None,
            logprobs=[-0.5] * tokens if generated else None,
            version_spans=((model_step, tokens),) if generated and model_step is not None else (),
            reward=None if score is None else {"score": score},
            status=status,
        )
        for _ in range(samples)
    ]
