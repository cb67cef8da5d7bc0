"""The conformance suite of storages: a backend is done when it passes.

    class TestMyStorage(StorageConformance):
        def make_storage(self) -> Storage:
            return MyStorage(...)

Every test gets a new, empty storage, opened for the owner `me`. The tests speak only the contract of
`forebay.storage.base`; they run under pytest, and need nothing of it.
"""

from __future__ import annotations

from forebay.testing.conformance.ending import Ending
from forebay.testing.conformance.leasing import Leasing
from forebay.testing.conformance.looking import Looking
from forebay.testing.conformance.producing import Producing
from forebay.testing.conformance.storing import Storing
from forebay.testing.conformance.undoing import Undoing

__all__ = ["StorageConformance"]


class StorageConformance(Storing, Producing, Leasing, Undoing, Ending, Looking):
    """Inherit from it, say how to make a storage, and let pytest run it."""
