"""Muon: momentum that is made orthogonal, for the matrices of a model, and AdamW for the rest.

`muon` is the optimizer, `muon_groups` chooses a model's matrices, `matrices` finds the matrices in
a step's directions and makes them orthogonal, also those that are split over processes.
"""
