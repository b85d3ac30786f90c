"""A training loop on timm's functions, as people write it."""

import argparse
import os
import signal
from pathlib import Path

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import (
    AverageMeter,
    CheckpointSaver,
    distribute_bn,
    init_distributed_device,
    reduce_tensor,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--model", default="test_vit")
parser.add_argument("--resume")
parser.add_argument("--crash-at", type=int)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()
device = init_distributed_device(args)
torch.manual_seed(0)
images = torch.randn(64, 3, 32, 32)
dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
model = timm.create_model(args.model, img_size=32, num_classes=2).to(device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs)
first = 0
if args.resume:
    state = torch.load(args.resume, map_location="cpu", weights_only=False)
    model.load_state_dict(state["state_dict"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1
if args.distributed:
    model = nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(dataset) if args.distributed else None
loader = DataLoader(dataset, batch_size=8, sampler=sampler, shuffle=sampler is None)
saver = None
if args.rank == 0:
    Path("output").mkdir(exist_ok=True)
    saver = CheckpointSaver(model, optimizer, args, checkpoint_dir="output", recovery_dir="output")
for epoch in range(first, args.epochs):
    if sampler:
        sampler.set_epoch(epoch)
    if epoch == args.crash_at:
        os.kill(os.getpid(), signal.SIGKILL)
    losses = AverageMeter()
    for batch, classes in loader:
        loss = nn.functional.cross_entropy(model(batch.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reduced = reduce_tensor(loss.detach(), args.world_size) if args.distributed else loss
        losses.update(reduced.item(), len(batch))
    if args.distributed:
        distribute_bn(model, args.world_size, True)
    scheduler.step(epoch + 1)
    if saver:
        saver.save_checkpoint(epoch, metric=-losses.avg)
    if args.rank == 0:
        print(f"epoch {epoch}: world size {args.world_size}, loss {losses.avg:.4f}", flush=True)
