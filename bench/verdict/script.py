"""A training script of a user, with the two calls that time its steps (timed and step)."""

import argparse
import signal
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from workload import sleeper

from tandem import sync
from tandem.timings import step, timed


class Images(Dataset):
    """Images made of the first bytes of each file. Their class is the parity of their number."""

    def __init__(self, folder):
        self.files = sorted(Path(folder, "train").glob("*/*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, place):
        data = bytearray(self.files[place].read_bytes())
        return torch.frombuffer(data, dtype=torch.uint8)[:192].view(3, 8, 8), place % 2


parser = argparse.ArgumentParser()
parser.add_argument("--data")
parser.add_argument("--batch", type=int)
parser.add_argument("--workers", type=int)
parser.add_argument("--sync")
options = parser.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
distributed.init_process_group("gloo")
model = DistributedDataParallel(sleeper(2), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
if options.sync:
    sync.attach(model, options.sync, optimizer=optimizer, warmup_steps=0)
images = Images(options.data)
sampler = DistributedSampler(images, drop_last=True)
loader = DataLoader(images, options.batch, sampler=sampler, num_workers=options.workers)
device = torch.device("cpu")
while True:
    for batch, classes in timed(loader, model):
        loss = nn.functional.cross_entropy(model(batch.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()
