"""Code that client and server share: sample orders, wire format and JSON records. No I/O, no asyncio."""
