"""Train a convolutional network to read digits, the way ImageNet scripts do."""

# With --dtype bfloat16 or float16 the model has that dtype, and FP16_Optimizer gives it float32
# masters and a scaled loss. With --plain there is no FP16_Optimizer.

import argparse

import numpy as np
import torch
from torch import nn

import amp_mp as amp

# Images are drawn from this font of 5 x 7 dots, so nothing has to be downloaded.
FONT = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #...# ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ..##. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. .#... ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. #.... #...# ...#. #...# #...# ..#.. #...# #...#
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .###.
"""


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 images (count, 1, 8, 8) of digits at random positions in noise; labels (count)."""
    rows = [row.split() for row in FONT.split("\n") if row]
    glyphs = np.array([[[dot == "#" for dot in row[k]] for row in rows] for k in range(10)])
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=count)
    images = random.normal(scale=0.3, size=(count, 1, 8, 8))
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(2), random.integers(4)
        image[0, top : top + 7, left : left + 5] += random.uniform(0.7, 1.3) * glyphs[label]
    return torch.from_numpy(images).float(), torch.from_numpy(labels)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """A 3 x 3 convolution, a batch norm and a ReLU."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


command_line = argparse.ArgumentParser(description=__doc__)
command_line.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
command_line.add_argument("--plain", action="store_true", help="leave FP16_Optimizer out")
command_line.add_argument("--epochs", type=int, default=6, help="passes over the images")
command_line.add_argument("--images", type=int, default=4096, help="training images")
command_line.add_argument("--batch", type=int, default=64, help="images per step")
command_line.add_argument(
    "--lr", type=float, default=0.1, help="learning rate; divided by 10 for the last third"
)
args = command_line.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
images, labels = draw(args.images, seed=1)
held_out_images, held_out_labels = draw(2048, seed=2)
model = nn.Sequential(
    convolution(1, 16), convolution(16, 32, stride=2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)
)
if dtype != torch.float32:
    amp.prepare(model, dtype)  # all but the batch norms
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
# The schedule gets the plain optimizer; FP16_Optimizer keeps its param_groups, so both see one lr.
schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, 2 * args.epochs // 3))
if not args.plain:
    optimizer = amp.FP16_Optimizer(optimizer, static_loss_scale=128.0)

losses = []
for epoch in range(args.epochs):
    model.train()
    for batch in torch.randperm(args.images).split(args.batch):
        optimizer.zero_grad()
        outputs = model(images[batch].to(dtype)).float()
        loss = nn.functional.cross_entropy(outputs, labels[batch])
        if args.plain:
            loss.backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    schedule.step()
    model.eval()
    with torch.no_grad():
        found = model(held_out_images.to(dtype)).argmax(1)
    top1 = 100 * (found == held_out_labels).float().mean().item()
    print(f"{args.dtype}, epoch {epoch + 1}: loss {losses[-1]:.4f}, top-1 {top1:.1f} %")
