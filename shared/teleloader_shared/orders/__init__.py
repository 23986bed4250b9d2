"""Samples of batch k of an epoch, as pure functions.

Start reading in `plan`; `permutation` is the shuffle that it evaluates, `seeding` derives all seeds.
"""
