"""Tests of the path to the accelerator, on a real one, or on a simulation of its asynchronous operations."""
