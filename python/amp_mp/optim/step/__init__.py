"""One step of an optimizer: measure, decide and apply in one native call.

`stepper` makes the call, `handed` is what a loss scaler passes to a step, `refuse` names parameters
that cannot be stepped, `whole` adds statistics over processes, and `step_report` tells the host
what a step did. Gathering and checking the tensors is csrc/torch/step, the passes themselves are
csrc/cpu and csrc/cuda.
"""
