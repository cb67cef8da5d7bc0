"""The element types that Forebay stores, with the names that safetensors gives them.

Each name has a code (which frames contain) and a little-endian numpy dtype. numpy has no bfloat16: its bits are stored
as uint16, and torch or the package ml_dtypes shows them as bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.errors import UnreadableData

BFLOAT16 = "BF16"
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (1, "bool"),
    "U8": (2, "uint8"),
    "I8": (3, "int8"),
    "U16": (4, "<u2"),
    "I16": (5, "<i2"),
    "U32": (6, "<u4"),
    "I32": (7, "<i4"),
    "U64": (8, "<u8"),
    "I64": (9, "<i8"),
    "F16": (10, "<f2"),
    "F32": (11, "<f4"),
    "F64": (12, "<f8"),
    "BF16": (13, "bfloat16"),
}
# Keyed by the dtype itself: its name is a property that costs more than encoding an array.
CODE_OF = {np.dtype(name): code for code, name in DTYPES.values() if name != "bfloat16"}
_NAME_OF = {np.dtype(dtype): name for name, (_, dtype) in DTYPES.items() if name != BFLOAT16}


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a numpy dtype, None if it is not plain data.

    >>> dtype_name(np.dtype(">f4")), dtype_name(np.dtype("U3"))
    ('F32', None)
    """
    name = _NAME_OF.get(dtype)
    if name is not None:
        return name
    return BFLOAT16 if dtype.name == "bfloat16" else _NAME_OF.get(dtype.newbyteorder("<"))


def raw_dtype(name: str) -> np.dtype[Any]:
    """The dtype that elements of this name are stored in; KeyError for an unknown name.

    >>> raw_dtype("F32"), raw_dtype("BF16")
    (dtype('float32'), dtype('uint16'))
    """
    return np.dtype("<u2" if name == BFLOAT16 else DTYPES[name][1])


def bfloat16_dtype() -> np.dtype[Any]:
    """The bfloat16 of the package ml_dtypes; UnreadableData if it is not installed."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise UnreadableData("an array of bfloat16; reading it needs the package ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(bfloat16)
    return found
