"""What wraps a script's optimizer or loss: amp.init's handle, FP16_Optimizer, LARC."""
