"""Memory that batches arrive in, the arrays made of it, and the devices that they are copied to.

May import: shared, and torch or JAX inside functions. Knows neither HTTP nor threads.
Start with `memory` for host memory and with `devices` for accelerators.
"""
