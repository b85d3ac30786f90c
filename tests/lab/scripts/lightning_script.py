"""As people write for Lightning: nothing of Tandem, and of the machines their number alone."""

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self):
        ranks = self.trainer.world_size
        print(f"epoch {self.current_epoch}: lightning {lightning.__version__}, {ranks} ranks")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
inputs = torch.randn(2048, 16)
images = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), strategy="ddp",
    max_epochs=int(sys.argv[1]), logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(images, batch_size=32))
