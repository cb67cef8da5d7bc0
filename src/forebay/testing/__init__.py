"""What users need to test with.

`StorageConformance` proves a storage backend against the contract; `forebay.testing.machine` (needs hypothesis) drives
it with random histories against a plain model.
"""

from forebay.testing.conformance import StorageConformance
from forebay.testing.samples import make_group

__all__ = ["StorageConformance", "make_group"]
