"""A torch.amp.GradScaler that reads the gradients once and never rewrites them.

`grad_scaler` is the class. `scale_update` decides where the loss scale's numbers are written after
a step, so that neither the host waits nor an extra kernel runs.
"""
