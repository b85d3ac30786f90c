"""A script for transformers' Trainer, as people write it; a callback times its steps."""

import argparse
import os
import signal

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tandem import timings


class Texts(Dataset):
    def __init__(self, count):
        self.tokens = (torch.arange(count)[:, None] + torch.arange(16)) % 32

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Times(TrainerCallback):
    def on_train_begin(self, args, state, control, **more):
        timings.timed((), trainer.model_wrapped)

    def on_step_end(self, args, state, control, **more):
        timings.step(samples=args.per_device_train_batch_size)
        if state.global_step == options.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--resume")
parser.add_argument("--crash-at", type=int)
options = parser.parse_args()
set_seed(0)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
settings = TrainingArguments(
    output_dir="checkpoints",
    max_steps=options.steps,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    logging_steps=10,
    save_steps=10,
    report_to="none",
    disable_tqdm=True,
)
model = GPT2LMHeadModel(config)
trainer = Trainer(model, settings, train_dataset=Texts(2048), callbacks=[Times()])
result = trainer.train(resume_from_checkpoint=options.resume)
print(f"step {result.global_step}: world size {settings.world_size}", flush=True)
