"""Host memory of received batches, their conversion to arrays, and their copy to devices.

May import shared, and torch or JAX inside functions. Independent of HTTP and threads.
Start reading in `memory` for host memory, and in `devices` for accelerators.
"""
