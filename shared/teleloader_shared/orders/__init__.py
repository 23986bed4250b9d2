"""Sample orders: pure functions that compute the dataset indices of any batch of an epoch.

Start reading in `plan`; `permutation` implements its shuffle, `mixture` interleaves several datasets, `windows` divides
an order into groups that depend on its samples, and `seeding` derives all seeds.
"""
