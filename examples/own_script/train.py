"""A small training script as people have them: DistributedDataParallel, and nothing of Tandem.

python -m torch.distributed.run --nproc_per_node=2 train.py --epochs 3
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--resume", help="a checkpoint to go on from")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
distributed.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

torch.manual_seed(0)
inputs = torch.randn(2048, 16)
images = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
sampler = DistributedSampler(images)
loader = DataLoader(images, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
first = 0
if options.resume:
    state = torch.load(options.resume, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1
model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)

for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for batch, classes in loader:
        loss = nn.functional.cross_entropy(model(batch.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if distributed.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        Path("checkpoints").mkdir(exist_ok=True)
        fresh = Path("checkpoints/fresh")
        torch.save({**state, "epoch": epoch}, fresh)
        fresh.rename(f"checkpoints/epoch-{epoch:03}.pt")  # never half a file under this name

distributed.destroy_process_group()
