"""As people write for Accelerate: nothing of Tandem, and nothing of the machines."""

import sys

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2048, 16)
images = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
helper = accelerate.Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(images, batch_size=32, shuffle=True)
model, optimizer, loader = helper.prepare(model, optimizer, loader)
for epoch in range(int(sys.argv[1])):
    for batch, classes in loader:
        loss = nn.functional.cross_entropy(model(batch), classes)
        optimizer.zero_grad()
        helper.backward(loss)
        optimizer.step()
    ranks = helper.num_processes
    print(f"epoch {epoch}: accelerate {accelerate.__version__}, {ranks} ranks", flush=True)
