"""Detection of optional dataset methods by name and signature.

The name alone is not enough, because libraries use the same name for different protocols: ``state_dict`` of the
StreamingDatasets of mosaicml-streaming and litdata, for example, requires the number of samples that their own loaders
have delivered.
"""

from __future__ import annotations

import inspect


def accepts(found: object, name: str, *arguments: object) -> bool:
    """Return True if `found` has a method `name` that can be called with `arguments`."""
    method = getattr(found, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # methods of C extensions may have no signature
        return True
    return True


def is_stateful(found: object) -> bool:
    """Return True if `found` implements torchdata's ``Stateful`` protocol."""
    return accepts(found, "state_dict") and accepts(found, "load_state_dict", {})
