"""Code that client and server share: sample orders, wire format and JSON records. No I/O, no asyncio.

Start reading in `spec` for the parameters of a loader, and in `codec` for the wire format.
"""

from __future__ import annotations

from teleloader_shared.registry import register

__all__ = ["register"]
