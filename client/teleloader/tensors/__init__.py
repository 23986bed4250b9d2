"""Host memory for received batches, their arrays, and the devices that they are copied to.

May import shared, and torch or JAX inside functions. Knows neither HTTP nor threads.
Start reading in `memory` for host memory, and in `devices` for accelerators.
"""
