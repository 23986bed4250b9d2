"""Measures the path to a GPU: copies, their overlap with computation, and the training loop's wait for data.

Start with `run`, the command. `accelerator` is the device, `training` the step, `contenders` are the loaders that are
compared; each of the other modules is one measurement.
"""
