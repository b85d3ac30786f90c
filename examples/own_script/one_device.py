"""A small training script for one device, as people have them. docs/own-script.md makes it one for
four PCs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
inputs = torch.randn(2048, 16)
images = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
loader = DataLoader(images, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    for batch, classes in loader:
        loss = nn.functional.cross_entropy(model(batch.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
