"""Text as codes: a table that only grows, and the codes of what is in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.errors import InvalidTrajectory
from forebay.trajectory.catalogue import MAX_TEXT_BYTES, MAX_TEXTS

__all__ = ["Texts"]


class Texts:
    """Codes count from 0 in the order in which texts came. Called under the buffer's lock."""

    def __init__(self, known: list[str]) -> None:
        self.known: list[str] = []
        self._codes: dict[str, int] = {}
        self._tables = [0]
        self.extend(known)

    def extend(self, texts: list[str]) -> int:
        """Add a table of its own behind the others, unless it is there; where it begins."""
        for start in self._tables:
            # Otherwise a buffer that saves and loads again and again would double its texts each time.
            have = self.known[start : start + len(texts)]
            if have == texts or (start + len(have) == len(self.known) and have == texts[: len(have)]):
                break
        else:
            start, have = len(self.known), []
            self._tables.append(start)
        for code, text in enumerate(texts[len(have) :], len(self.known)):
            self.known.append(text)
            self._codes.setdefault(text, code)
        return start

    def code(self, text: str) -> int:
        code = self._codes.get(text)
        if code is None:
            if len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
                raise InvalidTrajectory(f"a text has {len(text)} letters; expected at most {MAX_TEXT_BYTES} bytes")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidTrajectory(f"the text {text!r:.100} has letters that no file can hold") from None
            if len(self.known) >= MAX_TEXTS:
                raise InvalidTrajectory(f"there are {MAX_TEXTS} different texts already, and no room for {text!r:.100}")
            code = self._codes[text] = len(self.known)
            self.known.append(text)
        return code

    def encode(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The codes of an array of text."""
        codes = [self.code(text) for text in values.reshape(-1).tolist()]
        return np.array(codes, np.int32).reshape(values.shape)
