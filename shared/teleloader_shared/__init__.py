"""What client and server have in common: the plan, the wire format and the records. No I/O, no asyncio."""
