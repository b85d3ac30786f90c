"""A script that asks for its part of each batch. Its steps are long, so that quotas count."""

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import tandem
from tandem import sync, timings

STEPS, BATCH = 45, 768

distributed.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)


class Repeated(nn.Module):
    """The same layer 24 times, so that gradients are small beside the computing."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(256, 256), nn.Linear(256, 4)

    def forward(self, batch):
        for _ in range(24):
            batch = torch.tanh(self.layer(batch))
        return self.head(batch)


samples = TensorDataset(torch.randn(BATCH * STEPS + 400, 256))
model = nn.parallel.DistributedDataParallel(Repeated())
sync.attach(model, "allreduce")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(samples, batch_sampler=tandem.sampler(samples, BATCH))
step_count = sample_count = 0
for (batch,) in timings.timed(loader, model):
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    timings.step(loss=loss)
    step_count, sample_count = step_count + 1, sample_count + len(batch)
print(f"{step_count} steps, {sample_count} samples")
distributed.destroy_process_group()
