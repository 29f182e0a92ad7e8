"""Optimizers that work during the backward pass: `FusedOptimizer.attach`.

`attachment` has what both kinds share, and the one that reads each gradient while it is still in
the cache. `release` steps each parameter as soon as its gradient is complete and frees the
gradient; a DistributedDataParallel gives it averaged ones.
"""
