"""One step of an optimizer: measure, decide and apply in one native call.

`stepper` makes the call and tells what a step did, `marks` has the gradients that a loss scale is
for, `params` names parameters, and refuses those that cannot be stepped, and `whole` adds
statistics over processes.
Gathering and checking the tensors is csrc/torch/step, the passes themselves are
csrc/cpu and csrc/cuda.
"""
