"""A page to look at a trajectory before anyone trains on it: images, curves and exact numbers of every step.

Pure: a trajectory in, one HTML text out. The page needs no network and opens from a disk; its policy allows its own
style and script (by their hash) and the images that it carries, nothing else, and all that comes from data is escaped
or set as text. It is never larger than `max_bytes`: images give way first (smaller, then fewer), and what is left out
the page says. Steps are shown as `aligned` reads them: row t is what belongs to action t.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from forebay.core.dtypes import BFLOAT16
from forebay.errors import InvalidInput
from forebay.trajectory.data import STRING, Aligned, Array, Leaf, Path, Trajectory, aligned, dotted
from forebay.trajectory.frames import Camera, frames_that_fit, views_of

__all__ = ["trajectory_page"]

_MAX_CURVES = 16  # of one chart, and views of one camera: more cannot be told apart
_MAX_LETTERS = 2_000  # of one text
_FIRST = (
    *("rewards", "terminations", "truncations", "dones", "intervene_flags", "valid"),
    *("actions", "prev_values", "prev_logprobs", "versions", "curr_obs"),
)
_BADGES = {"terminations": "terminated", "truncations": "truncated", "dones": "done", "intervene_flags": "intervened"}
_LARGEST_EXACT = 2**53  # of a number in a browser


def trajectory_page(
    trajectory: Trajectory | Mapping[str, Any], *, title: str, facts: Mapping[str, str], max_bytes: int = 32 * 2**20
) -> str:
    """The page, at most `max_bytes` long as UTF-8; InvalidTrajectory names the field that cannot be read."""
    view = _View(aligned(trajectory))
    envs, steps = _numbers_that_fit(view, max_bytes // 2)
    limit = f"to keep the page within {max_bytes / 2**20:,.3g} MB"
    notes = [*_left_out(view, len(envs), steps, limit), *_not_finite(view, len(envs), steps)]
    own = {name: value for name, value in _facts(view).items() if name not in facts}
    parts = {
        "title": _escaped(title),
        "facts": "".join(
            f"<div><dt>{_escaped(k)}</dt><dd>{_escaped(v)}</dd></div>" for k, v in {**facts, **own}.items()
        ),
        "notes": "".join(f"<li>{note}</li>" for note in notes),
        "head": _json(_head(view, len(envs), steps)),
        "envs": "\n".join(f'<script type="application/json" class="env">{env}</script>' for env in envs),
        "images": "",
    }
    without = len(_filled(parts).encode())
    room = max_bytes - without - 1_000  # what says how images were cut, and what is around them
    if room < 0:
        raise InvalidInput(f"max_bytes is {max_bytes}; this page takes {without + 1_000} before any image. Allow more")
    frames = frames_that_fit(view.cameras, view.ends[:steps, : len(envs)], room)
    parts["images"] = _json({"png": frames.files, "curr": frames.current, "next": frames.following})
    if frames.cut:
        parts["notes"] = f"<li>{frames.cut} {limit}.</li>{parts['notes']}"
    return _filled(parts)


# --- what is in a trajectory --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chart:
    """Numbers over steps: curves, or lanes that are filled where a flag is set."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Array  # [T, B, components], of which there may be more than are shown
    following: Array | None  # the same in next_obs
    about: str = ""

    @property
    def lane(self) -> bool:
        return self.dtype == "BOOL" or self.name in _BADGES

    @property
    def curves(self) -> int:
        return min(int(self.values.shape[2]), _MAX_CURVES)

    def labels(self) -> list[str]:
        places = [np.unravel_index(curve, self.shape) for curve in range(self.curves)] if self.shape else [()]
        return ["[" + ",".join(str(int(part)) for part in place) + "]" if place else "" for place in places]


class _Text(NamedTuple):
    name: str
    values: Array
    following: Array | None


class _View:
    """The leaves of a trajectory by how they are shown, and the steps that the next one does not continue."""

    def __init__(self, whole: Aligned) -> None:
        self.whole = whole
        self.charts: list[_Chart] = []
        self.cameras: list[Camera] = []
        self.texts: list[_Text] = []
        self.more_views: dict[str, int] = {}
        every = np.ones((whole.steps, whole.envs), bool)
        self.valid, self.ends, apart = every, ~every, ~every
        rank = {name: place for place, name in enumerate(_FIRST)}
        for path in sorted(whole.leaves, key=lambda path: rank.get(path[0], len(rank))):
            leaf = whole.leaves[path]
            if 0 in leaf.shape:
                continue
            if path[0] == "next_obs" and self._twin(path, "curr_obs") is not None:
                continue
            twin = self._twin(path, "next_obs") if path[0] == "curr_obs" else None
            values, following = _in_order(leaf), None if twin is None else _in_order(twin)
            if following is not None:
                apart[:-1] |= _differ(following[:-1], values[1:])
            if path[0] in ("terminations", "truncations", "dones"):
                self.ends = self.ends | values.reshape(*every.shape, -1).astype(bool).any(axis=2)
            elif path == ("valid",):
                self.valid = values
            self._show(path, leaf, values, following)
        self.epoch_ends = every & (np.arange(1, whole.steps + 1) % whole.epoch_steps == 0)[:, None]
        self.gaps = apart & self.valid & ~self.ends & ~self.epoch_ends
        self._add_return()

    def _twin(self, path: Path, other: str) -> Leaf | None:
        """The leaf of the other observation, if it is the same kind of array."""
        one, twin = self.whole.leaves[path], self.whole.leaves.get((other, *path[1:]))
        return twin if twin is not None and (one.dtype, one.shape) == (twin.dtype, twin.shape) else None

    def _show(self, path: Path, leaf: Leaf, values: Array, following: Array | None) -> None:
        name = dotted(path)
        if leaf.dtype == STRING:
            self.texts.append(_Text(name, values, following))
            return
        if leaf.dtype == "U8" and len(path) > 1 and (views := views_of(values)) is not None:
            others = None if following is None else views_of(following)
            if views.shape[2] > _MAX_CURVES:
                self.more_views[name] = views.shape[2]
            for place in range(min(views.shape[2], _MAX_CURVES)):
                label = name if views.shape[2] == 1 else f"{name} view {place}"
                self.cameras.append(Camera(label, views[:, :, place], None if others is None else others[:, :, place]))
            return
        flat = values.reshape(*values.shape[:2], -1)
        other = None if following is None else following.reshape(flat.shape)
        about = "bfloat16" if leaf.dtype == BFLOAT16 else values.dtype.name
        about += f" {list(leaf.shape)}" if leaf.shape else ""
        about += f", the first {_MAX_CURVES} of {flat.shape[2]:,}" if flat.shape[2] > _MAX_CURVES else ""
        self.charts.append(_Chart(name, leaf.dtype, leaf.shape, flat, other, about))

    def _add_return(self) -> None:
        """What the rewards of an episode add up to; it starts anew where steps do not continue."""
        rewards = self.charts[0] if self.charts else None
        if rewards is None or rewards.name != "rewards":
            return  # rewards of no component, or of text
        numbers = _floats(rewards.dtype, rewards.values)
        goes_on = ~(self.ends | self.epoch_ends | self.gaps)
        with np.errstate(over="ignore", invalid="ignore"):
            gained = np.where(np.isfinite(numbers) & self.valid[:, :, None], numbers, 0.0).sum(axis=2)
            for step in range(1, len(gained)):
                gained[step] += np.where(goes_on[step - 1], gained[step - 1], 0.0)
        about = "sum of the episode's rewards"
        self.charts.insert(1, _Chart("return so far", "F64", (), gained[:, :, None], None, about))


def _in_order(leaf: Leaf) -> Array:
    """`[T, B, ...]`."""
    epochs, steps, *shape = leaf.values.shape
    return leaf.values.reshape(epochs * steps, *shape)


def _differ(one: Array, other: Array) -> Array:
    """Which [step, env] differ in any bit: the same NaN is the same."""
    found = np.zeros(one.shape[:2], bool)
    bits = f"u{one.dtype.itemsize}" if one.dtype.kind == "f" else one.dtype
    for step in range(len(one)):  # a step at a time: a comparison of all images would be as large as they are
        a, b = np.ascontiguousarray(one[step]).view(bits), np.ascontiguousarray(other[step]).view(bits)
        found[step] = (a != b).reshape(len(a), -1).any(axis=1)
    return found


# --- numbers and text ---------------------------------------------------------------------------------


def _floats(dtype: str, values: Array) -> Array:
    if dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def _plain(dtype: str, values: Array) -> list[Any]:
    """Numbers as JSON can say them and a browser reads them exactly: NaN is null, what has no number is text."""
    if values.dtype.kind in "biu" and dtype != BFLOAT16:
        return [each if abs(each) <= _LARGEST_EXACT else str(each) for each in (values + 0).tolist()]
    if dtype in ("F16", "F32"):
        # In as few digits as the dtype has: 0.1 and not 0.10000000149011612.
        values = values.astype("U32").astype(np.float64)
    numbers = _floats(dtype, values)
    if np.isfinite(numbers).all():
        return list(numbers.tolist())
    named = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return [None if math.isnan(each) else named.get(each, each) for each in numbers.tolist()]


def _numbers_that_fit(view: _View, room: int) -> tuple[list[str], int]:
    """The data of each env as JSON, and how many steps it has: the first envs and steps if all would be too much."""
    fewest = 2 * sum(chart.curves for chart in view.charts)  # bytes of a step
    steps = max(1, min(view.whole.steps, room // max(1, fewest)))
    found, used = [_json(_env(view, 0, steps))], 0
    while (used := len(found[0].encode())) > room and steps > 1:
        steps = max(1, min(steps - 1, int(0.95 * steps * room / used)))
        found = [_json(_env(view, 0, steps))]
    for env in range(1, view.whole.envs):
        block = _json(_env(view, env, steps))
        used += len(block.encode()) + 60  # the element around it
        if used > room:
            break
        found.append(block)
    return found, steps


def _env(view: _View, env: int, steps: int) -> dict[str, Any]:
    def curves(chart: _Chart, rows: Array) -> list[list[Any]]:
        return [_plain(chart.dtype, rows[:, curve]) for curve in range(chart.curves)]

    def following(chart: _Chart) -> dict[int, list[Any]]:
        if chart.following is None:
            return {}
        rows = _apart(chart.values, chart.following, env, steps)
        found = curves(chart, chart.following[rows, env])
        return {row: [curve[place] for curve in found] for place, row in enumerate(rows)}

    def words(text: _Text) -> dict[str, Any]:
        table: dict[str, int] = {}
        codes = [table.setdefault(each, len(table)) for each in text.values[:steps, env]]
        others = {}
        if text.following is not None:
            rows = _apart(text.values, text.following, env, steps)
            others = {row: table.setdefault(text.following[row, env], len(table)) for row in rows}
        return {"table": [_shortened(each) for each in table], "codes": codes, "next": others}

    return {
        "values": [curves(chart, chart.values[:steps, env]) for chart in view.charts],
        "next": [following(chart) for chart in view.charts],
        "texts": [words(text) for text in view.texts],
        **{
            name: np.flatnonzero(flags[:steps, env]).tolist()
            for name, flags in (("ends", view.ends), ("gaps", view.gaps), ("invalid", ~view.valid))
        },
    }


def _apart(values: Array, following: Array, env: int, steps: int) -> list[int]:
    """The steps whose next observation is not the one of the row after it."""
    differ = np.ones(len(values), bool)
    differ[:-1] = _differ(following[:-1, env : env + 1], values[1:, env : env + 1])[:, 0]
    return list(np.flatnonzero(differ[:steps]).tolist())


def _shortened(text: str) -> str:
    more = len(text) - _MAX_LETTERS
    return text if more <= 0 else f"{text[:_MAX_LETTERS]} … and {more:,} more letters"


def _head(view: _View, envs: int, steps: int) -> dict[str, Any]:
    charts = []
    for chart in view.charts:
        numbers = _floats(chart.dtype, chart.values[:steps, :envs, : chart.curves])
        finite = numbers[np.isfinite(numbers)]
        bounds = [float(finite.min()), float(finite.max())] if finite.size else None
        told = {"name": chart.name, "about": chart.about, "lane": chart.lane, "badge": _BADGES.get(chart.name)}
        charts.append({**told, "labels": chart.labels(), "bounds": bounds, "next": chart.following is not None})
    cameras = [
        {"name": name, "height": images.shape[2], "width": images.shape[3], "next": following is not None}
        for name, images, following in view.cameras
    ]
    return {
        "steps": steps,
        "envs": envs,
        "epoch": view.whole.epoch_steps,
        "charts": charts,
        "cameras": cameras,
        "texts": [text.name for text in view.texts],
    }


# --- the page -----------------------------------------------------------------------------------------


def _facts(view: _View) -> dict[str, str]:
    whole = view.whole
    found = {"steps": f"{whole.steps:,}", "environments": f"{whole.envs:,}"}
    if whole.epochs > 1:
        found["rollout epochs"] = f"{whole.epochs:,} of {whole.epoch_steps:,} steps"
    found["valid transitions"] = f"{np.count_nonzero(view.valid):,} of {view.valid.size:,}"
    found["episode ends"] = f"{np.count_nonzero(view.ends & view.valid):,}"
    if whole.max_episode_length:
        found["max_episode_length"] = f"{whole.max_episode_length:,}"
    if whole.model_weights_id:
        found["model_weights_id"] = whole.model_weights_id
    return found


def _left_out(view: _View, envs: int, steps: int, limit: str) -> Iterator[str]:
    """What else is in the trajectory and not on the page, as HTML."""
    if envs < view.whole.envs:
        yield f"Only the first {envs:,} of {view.whole.envs:,} environments are here, {limit}."
    if steps < view.whole.steps:
        yield f"Only the first {steps:,} of {view.whole.steps:,} steps are here, {limit}."
    for name, views in view.more_views.items():
        yield f"{_escaped(name)}: only the first {_MAX_CURVES} of {views:,} views are here."


def _not_finite(view: _View, envs: int, steps: int) -> Iterator[str]:
    """The fields that have NaN or infinity where training would draw them, as HTML with a button that goes there."""
    for chart in view.charts:
        if chart.dtype not in (BFLOAT16, "F16", "F32", "F64"):
            continue
        name, found = chart.name, _broken(chart.dtype, chart.values, view.valid)
        if not found.any() and chart.following is not None:
            name, found = f"{name} in next_obs", _broken(chart.dtype, chart.following, view.valid)
        if not (count := int(found.sum())):
            continue
        step, env = (int(each) for each in np.argwhere(found)[0])
        where = f"step {step}, environment {env}"
        if step < steps and env < envs:
            where = f'<button type="button" data-step="{step}" data-env="{env}">{where}</button>'
        values = "value is" if count == 1 else "values are"
        yield f"<b>{_escaped(name)}</b>: {count:,} {values} NaN or infinite, first at {where}"


def _broken(dtype: str, values: Array, valid: Array) -> Array:
    """How many values of each valid [step, env] are not finite."""
    return np.stack([(~np.isfinite(_floats(dtype, row))).sum(axis=1) for row in values]) * valid


def _escaped(text: str) -> str:
    return html.escape(_writable(text))


def _json(value: object) -> str:
    """JSON that no HTML parser takes for anything else, wherever it stands."""
    text = _writable(json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _writable(text: str) -> str:
    """Without halves of characters, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


def _filled(parts: Mapping[str, str]) -> str:
    # In one pass: what is put in is not looked at again.
    return re.sub("<!--([a-z]+)-->", lambda found: {**parts, "policy": _policy()}[found[1]], _template())


@cache
def _template() -> str:
    return resources.files("forebay.trajectory").joinpath("page.html").read_text("utf-8")


@cache
def _policy() -> str:
    """What the page may do: run the script and apply the style of the template, show images that it carries."""

    def hashed(tag: str) -> str:
        body = _template().partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return "'sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; img-src data:; style-src {hashed('style')}; script-src {hashed('script')}; "
        "base-uri 'none'; form-action 'none'"
    )
