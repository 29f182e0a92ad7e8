"""One step of an optimizer: gather the tensors, then measure, decide and apply in one native call.

`gather` collects and checks the tensors, `decide` makes the inputs of the decision, `handed` is
what a loss scaler passes to a step, `run` makes the native call, and `step_report` tells the host
what a step did. The passes themselves are csrc/cpu and csrc/cuda.
"""
