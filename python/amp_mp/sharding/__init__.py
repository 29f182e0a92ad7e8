"""Tensors that are split over processes: torch's DTensors, seen from one process.

`shards` finds a DTensor's memory on this process and its place in the whole tensor. Imports no
other folder, and torch.distributed.tensor only where there are DTensors.
"""
