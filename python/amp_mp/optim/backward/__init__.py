"""Gradient release, `FusedOptimizer.attach`: steps a parameter as soon as its gradient is complete.

`release` has the hooks and the step of each parameter, `ddp_hook` what gives it the averaged
gradients of a DistributedDataParallel.
"""
