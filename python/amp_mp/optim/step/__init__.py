"""One step of an optimizer: measure, decide and apply in one native call.

`stepper` makes the call and tells what a step did, `overflow_report` which gradients are inf or
NaN. `ledger` knows the gradients that carry a loss scale, `replaced` warns of parameters that no
step changes, and `params` refuses those that cannot be stepped. Gathering and checking the tensors
is csrc/torch/step, the passes themselves are csrc/cpu and csrc/cuda.
"""
