"""The path to the accelerator: on a real one, or where there is none on a simulation of its asynchrony."""
