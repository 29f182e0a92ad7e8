"""A torch.amp.GradScaler that reads the gradients once and never rewrites them."""
