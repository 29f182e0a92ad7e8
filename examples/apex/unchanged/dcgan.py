"""Train a generator and a discriminator of tiny images, with Apex's calls alone.

Two models, two optimizers, and three losses with a loss scale each.
Run it as `python -m amp_mp.apex dcgan.py --opt_level O2`.
"""

# ruff: noqa: N816 (the names of variables are those of Apex's example)

import argparse

import torch
from apex import amp
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--niter", type=int, default=100, help="steps")
parser.add_argument("--batchSize", type=int, default=32)
parser.add_argument("--nz", type=int, default=8, help="size of the latent vector")
parser.add_argument("--ngf", type=int, default=8)
parser.add_argument("--ndf", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manualSeed", type=int, default=2809)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--overflow_at", type=int, default=-1, help="a step whose gradients are inf")
parser.add_argument("--save", default="", metavar="PATH", help="checkpoint to write at the end")
parser.add_argument("--resume", default="", metavar="PATH", help="checkpoint to go on from")
opt = parser.parse_args()

torch.manual_seed(opt.manualSeed)
device = torch.device(opt.device)


def weights_init(m):
    """Weights of N(0, 0.02) for convolutions, N(1, 0.02) for batch norms."""
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


def real_images(count):
    """Images of 8 x 8 with a bright disc in the middle."""
    grid = torch.linspace(-1, 1, 8)
    radius = (grid[:, None] ** 2 + grid[None, :] ** 2).sqrt()
    size = 0.4 + 0.4 * torch.rand(count, 1, 1, 1)
    return torch.tanh(4 * (size - radius)).to(device)


netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, opt.ngf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(opt.ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(opt.ngf * 2, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)

netD = nn.Sequential(
    nn.Conv2d(1, opt.ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(opt.ndf, opt.ndf * 2, 3, 1, 1, bias=False),
    nn.BatchNorm2d(opt.ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(opt.ndf * 2, 1, 4, 1, 0, bias=False),
).to(device)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
real_label, fake_label = 1.0, 0.0

optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)

saved = {"netD": netD, "netG": netG, "optimizerD": optimizerD, "optimizerG": optimizerG, "amp": amp}
start = 0
if opt.resume:
    checkpoint = torch.load(opt.resume, map_location=device)
    for name, each in saved.items():
        each.load_state_dict(checkpoint[name])
    torch.set_rng_state(checkpoint["random"].cpu())
    start = checkpoint["step"]

losses, outputs = [], []
for step in range(start, opt.niter):
    # Update D: maximise log(D(x)) + log(1 - D(G(z))).
    netD.zero_grad()
    real = real_images(opt.batchSize)
    label = torch.full((opt.batchSize,), real_label, device=device)
    output = netD(real).view(-1)
    errD_real = criterion(output, label)
    if step == opt.overflow_at:
        errD_real = errD_real * float("inf")
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    D_x = output.float().mean().item()

    noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
    fake = netG(noise)
    label.fill_(fake_label)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    optimizerD.step()

    # Update G: maximise log(D(G(z))).
    netG.zero_grad()
    label.fill_(real_label)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()

    losses.append((errD.item(), errG.item()))
    outputs.append(D_x)

print(f"[{opt.niter}] Loss_D: {losses[-1][0]:.4f} Loss_G: {losses[-1][1]:.4f}")
scales = amp.state_dict()
if opt.save:
    checkpoint = {name: each.state_dict() for name, each in saved.items()}
    torch.save({**checkpoint, "random": torch.get_rng_state(), "step": opt.niter}, opt.save)
