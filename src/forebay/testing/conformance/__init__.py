"""The conformance suite of storages: a backend is done when it passes.

    class TestMyStorage(StorageConformance):
        def make_storage(self) -> Storage:
            return MyStorage(...)

Every test gets a new, empty storage, opened for the owner `me`. The tests use only the contract of
`forebay.storage.base`, and a `ReplayBuffer` where a payload passes through it. pytest runs them; they do not import it.
"""

from __future__ import annotations

from forebay.testing.conformance.leasing import Leasing
from forebay.testing.conformance.looking import Looking
from forebay.testing.conformance.sharing import Sharing
from forebay.testing.conformance.storing import Storing

__all__ = ["StorageConformance"]


class StorageConformance(Storing, Leasing, Looking, Sharing):
    """Inherit from it, say how to make a storage, and let pytest run it."""
