"""A script for Lightning, as people write it; a callback times its steps."""

import argparse
import os
import signal

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tandem import timings


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_end(self):
        if self.current_epoch == options.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.trainer.callback_metrics["loss"]
        ranks = self.trainer.world_size
        self.print(f"epoch {self.current_epoch}: world size {ranks}, loss {loss:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Times(lightning.Callback):
    def on_train_start(self, trainer, module):
        timings.timed((), trainer.strategy.model)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        timings.step(samples=len(batch[0]))


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--resume")
parser.add_argument("--crash-at", type=int)
parser.add_argument("--nodes", type=int, default=1)
options = parser.parse_args()
lightning.seed_everything(0)
inputs = torch.randn(2048, 16)
points = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
trainer = lightning.Trainer(
    num_nodes=options.nodes,
    max_epochs=options.epochs,
    enable_progress_bar=False,
    callbacks=[Times(), ModelCheckpoint("checkpoints", save_last=True, save_top_k=-1)],
)
trainer.fit(Classifier(), DataLoader(points, batch_size=32, shuffle=True), ckpt_path=options.resume)
