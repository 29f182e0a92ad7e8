"""Train a convolutional network on drawn images, with Apex's calls alone.

Run it as `python -m amp_mp.apex imagenet.py --opt-level O2`, or in several processes as
`torchrun --nproc-per-node 2 -m amp_mp.apex imagenet.py --opt-level O2 --sync_bn`.
"""

import argparse
import os
import sys

import apex
import torch
from apex import amp
from apex.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch import nn

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("--epochs", default=3, type=int, metavar="N")
parser.add_argument("--start-epoch", default=0, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=64, type=int, metavar="N")
parser.add_argument("--images", default=1024, type=int, help="training images")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, metavar="LR")
parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float, metavar="W")
parser.add_argument("--resume", default="", type=str, metavar="PATH")
parser.add_argument("--save", default="", type=str, metavar="PATH", help="checkpoint to write")
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", "0")), type=int)
parser.add_argument("--sync_bn", action="store_true", help="enabling apex sync BN.")
parser.add_argument("--opt-level", type=str)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--overflow-at", default=-1, type=int, help="a step whose gradients are inf")
args = parser.parse_args()

args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
args.world_size = 1
if args.distributed:
    backend = "nccl" if args.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend=backend, init_method="env://")
    args.world_size = torch.distributed.get_world_size()
if args.device == "cuda":
    torch.cuda.set_device(args.local_rank)


def draw(count, seed):
    """Images of 8 x 8 in noise, each with a stripe; its direction is the class."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(4, (count,), generator=generator)
    images = 0.7 * torch.randn(count, 1, 8, 8, generator=generator)
    eye = torch.eye(8)
    row, column = torch.zeros(8, 8), torch.zeros(8, 8)
    row[3], column[:, 4] = 1, 1
    stripes = torch.stack([row, column, eye, eye.flip(1)])
    return (images + stripes[target][:, None]).to(args.device), target.to(args.device)


def main():
    """Train, and validate after each epoch; returns what the test of this script compares."""
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 4),
    )
    if args.sync_bn:
        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    model = model.to(args.device)

    # Scale learning rate based on global batch size
    args.lr = args.lr * float(args.batch_size * args.world_size) / 64.0
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )

    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

    criterion = nn.CrossEntropyLoss().to(args.device)

    if args.resume:
        checkpoint = torch.load(args.resume, map_location=args.device)
        args.start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])

    losses = []
    for epoch in range(args.start_epoch, args.epochs):
        losses += train(model, criterion, optimizer, epoch)
        prec1 = validate(model)
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, Prec@1 {prec1:.1f}")
        if args.save and args.local_rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(state, args.save)
    return model, optimizer, losses


def train(model, criterion, optimizer, epoch):
    """One pass over the images; returns the losses."""
    model.train()
    images, target = draw(args.images, seed=1 + args.local_rank)
    generator = torch.Generator().manual_seed(args.seed + epoch)
    losses = []
    for batch in torch.randperm(args.images, generator=generator).split(args.batch_size):
        adjust_learning_rate(optimizer, epoch)
        output = model(images[batch])
        loss = criterion(output, target[batch])
        if len(losses) == args.overflow_at:
            loss = loss * float("inf")
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def validate(model):
    """Percent of held-out images that are found right."""
    model.eval()
    images, target = draw(1024, seed=1000)
    with torch.no_grad():
        found = model(images).argmax(1)
    return 100 * (found == target).float().mean().item()


def adjust_learning_rate(optimizer, epoch):
    """LR schedule: divided by 10 in the last epoch of three."""
    lr = args.lr * (0.1 ** (epoch // 2))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


if __name__ == "__main__":
    model, optimizer, losses = main()
    if args.distributed:
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # a thread of gloo can keep a process from ending
