"""Images as PNG files, with zlib alone, so that a page can carry them. Pure; encodes, does not decode."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

__all__ = ["png"]

_GREY, _RGB, _RGBA = 0, 2, 6
_COLOUR_TYPE = {1: _GREY, 3: _RGB, 4: _RGBA}
_NONE, _SUB, _UP, _PAETH = 0, 1, 2, 4


def png(image: np.ndarray[Any, Any]) -> bytes:
    """A uint8 image `[H, W]` or `[H, W, 1 | 3 | 4]` as a file.

    >>> png(np.zeros((2, 3), np.uint8))[1:4]
    b'PNG'
    """
    height, width = image.shape[:2]
    channels = image.shape[2] if image.ndim == 3 else 1
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    rows = _filtered(np.ascontiguousarray(image).reshape(height, width * channels), channels)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def _filtered(rows: np.ndarray[Any, Any], channels: int) -> np.ndarray[Any, Any]:
    """Every row as differences to its neighbours, by that filter whose differences are the smallest."""
    left, up, corner = (np.zeros_like(rows) for _ in range(3))
    left[:, channels:] = rows[:, :-channels]
    up[1:] = rows[:-1]
    corner[1:] = left[:-1]
    kinds = np.array([_NONE, _SUB, _UP, _PAETH], np.uint8)
    tried = np.stack([rows, rows - left, rows - up, rows - _paeth(left, up, corner)])
    cost = np.abs(tried.view(np.int8).astype(np.int16)).sum(axis=2, dtype=np.int64)
    best = cost.argmin(axis=0)
    return np.concatenate([kinds[best][:, None], tried[best, np.arange(len(rows))]], axis=1)


def _paeth(*neighbours: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of left, up and corner the one nearest to left + up - corner; the earlier one where two are as near."""
    left, up, corner = (each.astype(np.int16) for each in neighbours)
    to_left, to_up, to_corner = np.abs(up - corner), np.abs(left - corner), np.abs(left + up - 2 * corner)
    nearest = np.where((to_left <= to_up) & (to_left <= to_corner), left, np.where(to_up <= to_corner, up, corner))
    return nearest.astype(np.uint8)
