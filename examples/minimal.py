"""The smallest example: bfloat16 weights, float32 masters, clipping inside the step."""

import torch
from torch import nn

import amp_mp as amp

torch.manual_seed(0)
inputs = torch.randn(4096, 32)
targets = (inputs @ torch.randn(32, 1)).tanh()

model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1))
amp.prepare(model, torch.bfloat16)  # in place
optimizer = amp.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)

for step in range(200):
    loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 199):
        print(f"step {step + 1:3}: loss {loss.item():.5f}")
