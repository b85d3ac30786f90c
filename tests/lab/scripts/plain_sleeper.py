"""A script for several machines: DDP, the sleeping stand-in and nothing of Tandem.

train.py --steps 100
"""

import argparse

import torch
from sleeping_model import heavy_sleeper
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

distributed.init_process_group("gloo")
torch.manual_seed(0)
size = options.steps * 32 * distributed.get_world_size()
classes = torch.randint(10, (size,))
images = TensorDataset(torch.randn(size, 3, 4, 4), classes)
loader = DataLoader(images, batch_size=32, sampler=DistributedSampler(images))
model = nn.parallel.DistributedDataParallel(heavy_sleeper(10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch, targets in loader:
    loss = nn.functional.cross_entropy(model(batch), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}", flush=True)
distributed.destroy_process_group()
