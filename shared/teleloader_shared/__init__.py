"""Code of both client and server: orders, wire format and records. No I/O, no asyncio."""
