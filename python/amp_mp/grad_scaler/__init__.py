"""A torch.amp.GradScaler that reads the gradients once and never rewrites them.

`grad_scaler` is the class; it hands the loss scale to the step of an amp_mp optimizer.
`scale_update` decides where the next scale is written, so that the host never waits for it.
"""
