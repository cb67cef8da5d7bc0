"""The images of a trajectory, as many and as large as a page has room for.

An image that occurs twice is carried once: a `next_obs` that is the observation of the following row costs nothing.
What does not fit is cut evenly, and said: images get smaller first, then fewer steps have one, then fewer environments.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from forebay.trajectory.data import Array
from forebay.trajectory.png import png

__all__ = ["Camera", "Frames", "frames_that_fit", "views_of"]

_SMALLEST_SIDE = 4  # below, an array of uint8 is a handful of numbers and no image
_SIDES = (512, 384, 256, 192, 128, 96)  # pixels across that are left when images must shrink
_TRIED = 24  # images that tell how large the others will be


class Camera(NamedTuple):
    """One view of an array of images."""

    name: str
    images: Array  # [T, B, H, W] or [T, B, H, W, 3 | 4]
    following: Array | None  # the same in next_obs

    @property
    def side(self) -> int:
        return int(max(self.images.shape[2:4]))


class Frames(NamedTuple):
    """PNG files as base64, and for every camera and env the pairs of a step and a place among them."""

    files: list[str]
    current: list[list[list[tuple[int, int]]]]
    following: list[list[list[tuple[int, int]]]]
    cut: str  # what was done to make them fit; "" if nothing was


class _Shot(NamedTuple):
    """One image of the page; `digest` is the same for the same image."""

    camera: int
    env: int
    step: int
    following: bool
    digest: bytes


class _Plan(NamedTuple):
    """Which images are shown, and how large."""

    side: int
    every: int
    envs: int


def views_of(values: Array) -> Array | None:
    """Arrays of uint8 `[T, B, ...]` as images `[T, B, view, H, W]` or `[..., H, W, 3 | 4]`; None if they are none.

    >>> views_of(np.zeros((5, 2, 3, 64, 48), np.uint8)).shape, views_of(np.zeros((5, 2, 7), np.uint8))
    ((5, 2, 1, 64, 48, 3), None)
    """
    shape = values.shape[2:]
    if len(shape) >= 3 and shape[-1] in (1, 3, 4) and min(shape[-3:-1]) >= _SMALLEST_SIDE:
        axes = 3
    elif len(shape) >= 3 and shape[-3] in (1, 3) and min(shape[-2:]) >= _SMALLEST_SIDE:
        values, axes = np.moveaxis(values, -3, -1), 3
    elif len(shape) >= 2 and min(shape[-2:]) >= _SMALLEST_SIDE:
        axes = 2
    else:
        return None
    if axes == 3 and values.shape[-1] == 1:
        values, axes = values[..., 0], 2
    return values.reshape(*values.shape[:2], -1, *values.shape[-axes:])


def frames_that_fit(cameras: Sequence[Camera], ends: Array, room: int) -> Frames:
    """The images by the first plan that takes at most `room` bytes of JSON; `ends` is where episodes end, [T, B]."""
    steps, envs = ends.shape
    shots = list(_shots(cameras, steps, envs))
    distinct = len({shot.digest for shot in shots}) / max(1, len(shots))
    tried = shots[:: max(1, len(shots) // _TRIED)]
    room -= 8 * len(cameras) * envs  # the brackets around them
    found: dict[bytes, str] = {}
    side, mean = 0, 0.0
    for plan in _plans(max((camera.side for camera in cameras), default=1), steps, envs):
        keeps = _kept(plan, ends)
        kept = [shot for shot in shots if keeps[shot.step, shot.env]]
        if plan.side != side:
            side, found = plan.side, {shot.digest: _encoded(cameras, shot, plan.side) for shot in tried}
            mean = sum(map(len, found.values())) / max(1, len(found))
        if mean * distinct * len(kept) > room:
            continue
        for shot in kept:
            if shot.digest not in found:
                found[shot.digest] = _encoded(cameras, shot, side)
        files = {shot.digest: found[shot.digest] for shot in kept}
        if sum(len(file) + 3 for file in files.values()) + 24 * len(kept) <= room:
            return _frames(cameras, kept, files, envs, _said(plan, cameras, envs))
    return _frames(cameras, [], {}, envs, "No images are here,")


def _frames(cameras: Sequence[Camera], kept: Sequence[_Shot], files: dict[bytes, str], envs: int, cut: str) -> Frames:
    place = {digest: number for number, digest in enumerate(files)}
    current: list[list[list[tuple[int, int]]]] = [[[] for _ in range(envs)] for _ in cameras]
    following: list[list[list[tuple[int, int]]]] = [[[] for _ in range(envs)] for _ in cameras]
    for shot in kept:
        pairs = following if shot.following else current
        pairs[shot.camera][shot.env].append((shot.step, place[shot.digest]))
    return Frames(list(files.values()), current, following, cut)


def _shots(cameras: Sequence[Camera], steps: int, envs: int) -> Iterator[_Shot]:
    """All images, those of next_obs only where they are not what the following row has."""
    for number, camera in enumerate(cameras):
        for env in range(envs):
            digests = [_digest(image) for image in camera.images[: steps + 1, env]]
            for step in range(steps):
                yield _Shot(number, env, step, False, digests[step])
                if camera.following is not None:
                    digest = _digest(camera.following[step, env])
                    if digests[step + 1 : step + 2] != [digest]:
                        yield _Shot(number, env, step, True, digest)


def _digest(image: Array) -> bytes:
    shape = ",".join(map(str, image.shape)).encode()
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16, key=shape).digest()


def _encoded(cameras: Sequence[Camera], shot: _Shot, side: int) -> str:
    _, images, following = cameras[shot.camera]
    image = (following if shot.following and following is not None else images)[shot.step, shot.env]
    stride = math.ceil(max(image.shape[:2]) / side)
    return base64.b64encode(png(image[::stride, ::stride])).decode()


def _plans(side: int, steps: int, envs: int) -> Iterator[_Plan]:
    """From all images as they are to a single one."""
    sides = [side, *(smaller for smaller in _SIDES if smaller < side)]
    yield from (_Plan(smaller, 1, envs) for smaller in sides)
    every = 1
    while every < steps:
        every *= 2
        yield _Plan(sides[-1], every, envs)
    while envs := envs // 2:
        yield _Plan(sides[-1], every, envs)


def _kept(plan: _Plan, ends: Array) -> Array:
    """Which [step, env] have images by a plan."""
    steps = len(ends)
    kept = np.repeat((np.arange(steps) % plan.every == 0)[:, None], ends.shape[1], axis=1)
    if plan.every < steps:
        # How an episode ended is worth more than the steps before, as long as ends are not most of all steps.
        few = np.count_nonzero(ends, axis=0) * plan.every <= steps
        kept |= ends & few
        kept[-1] = True
    kept[:, plan.envs :] = False
    return kept


def _said(plan: _Plan, cameras: Sequence[Camera], envs: int) -> str:
    said = []
    if (stride := max((math.ceil(camera.side / plan.side) for camera in cameras), default=1)) > 1:
        said.append(f"have at most {plan.side} pixels across (the largest: 1 of {stride} pixels each way)")
    if plan.every > 1:
        said.append(f"are of 1 step in {plan.every:,}, and of episode ends where these are few")
    if plan.envs < envs:
        said.append(f"are of the first {plan.envs:,} of {envs:,} environments")
    return f"Images {', and '.join(said)}," if said else ""
