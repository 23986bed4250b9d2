"""Element types of the wire format, by name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.errors import ProtocolError, TeleloaderError
from teleloader_shared.text import short

NUMPY: Final[dict[str, np.dtype[np.generic]]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Element types that NumPy supports, in little-endian byte order."""

EXTENDED: Final[dict[str, np.dtype[np.generic]]] = {
    "bfloat16": NUMPY["uint16"],
    "float8_e4m3fn": NUMPY["uint8"],
    "float8_e4m3fnuz": NUMPY["uint8"],
    "float8_e5m2": NUMPY["uint8"],
    "float8_e5m2fnuz": NUMPY["uint8"],
}
"""Types of torch and ml_dtypes that NumPy lacks, each with the NumPy type that holds its bits."""

NAMES: Final = (*NUMPY, *EXTENDED)


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return `dtype.name` from a cache, because NumPy computes the string at each access."""
    return dtype.name


def storage(name: str) -> np.dtype[np.generic]:
    """Return the little-endian NumPy type that stores the bits of element type `name`.

    Raises:
        ProtocolError: If no type has that name.
    """
    found = NUMPY.get(name) or EXTENDED.get(name)
    if found is None:
        raise ProtocolError(f"unknown dtype {short(name)} in a frame: expected one of {', '.join(NAMES)}")
    return found


def bits_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view of the array, as unsigned integers if the type is one of `EXTENDED`, in the same byte order.

    Args:
        array: Array of a type in `NAMES`.
    """
    bits = EXTENDED.get(name_of(array.dtype))
    return array if bits is None else array.view(bits.newbyteorder(array.dtype.byteorder))


def extended_numpy(name: str) -> np.dtype[np.generic]:
    """Return the ml_dtypes type `name`, for clients without torch.

    Raises:
        TeleloaderError: If ml_dtypes is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise TeleloaderError(
            f"NumPy has no dtype {name}, which the batch contains: run pip install ml_dtypes, or pass output='torch'"
        ) from None
    found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return found
