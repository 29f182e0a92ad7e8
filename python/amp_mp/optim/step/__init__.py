"""One step of an optimizer: measure, decide and apply in one native call.

`stepper` makes the call and tells what a step did, `overflow_report` which gradients are inf or
NaN, and `params` refuses parameters that cannot be stepped. Gathering and checking the tensors is
csrc/torch/step, the passes themselves are csrc/cpu and csrc/cuda.
"""
