"""Which samples batch k of an epoch holds, as pure functions.

Start reading in `plan`; `permutation` is the shuffle that it evaluates, `seeding` derives all seeds.
"""
