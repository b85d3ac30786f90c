"""A script for Accelerate, as people write it."""

import argparse
import os
import signal

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--resume")
parser.add_argument("--crash-at", type=int)
options = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
inputs = torch.randn(2048, 16)
points = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(points, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = 0
if options.resume:
    accelerator.load_state(options.resume)
    first = int(options.resume.rpartition("_")[2]) + 1
for epoch in range(first, options.epochs):
    for batch, classes in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if epoch == options.crash_at:
        os.kill(os.getpid(), signal.SIGKILL)
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"epoch {epoch}: world size {accelerator.num_processes}, loss {mean:.4f}")
    accelerator.save_state(f"checkpoints/epoch_{epoch}")
