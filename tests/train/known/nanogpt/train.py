"""In the style of nanoGPT's train.py: settings are globals, and ranks come from the environment."""

import os
import signal
import sys
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
eval_interval = 10
init_from = "scratch"
dataset = "characters"
gradient_accumulation_steps = 4
batch_size = 8
block_size = 32
max_iters = 30
learning_rate = 1e-2
crash_at = -1
backend = "nccl" if torch.cuda.is_available() else "gloo"
device = "cuda" if torch.cuda.is_available() else "cpu"
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
rank, world_size = 0, 1
if ddp:
    init_process_group(backend=backend)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
if rank == 0:
    Path(out_dir).mkdir(exist_ok=True)
torch.manual_seed(1337 + rank)
data_dir = Path("data") / dataset


def get_batch(split):
    data = numpy.memmap(data_dir / f"{split}.bin", dtype=numpy.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype("int64")) for i in starts])
    targets = [data[i + 1 : i + 1 + block_size].astype("int64") for i in starts]
    y = torch.stack([torch.from_numpy(target) for target in targets])
    return x.to(device), y.to(device)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 64)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits = self.head(self.body(self.tokens(x), mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(Path(out_dir) / "ckpt.pt", map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"] + 1
if ddp:
    model = DistributedDataParallel(model)
raw_model = model.module if ddp else model
while iter_num <= max_iters:
    if iter_num == crash_at:
        os.kill(os.getpid(), signal.SIGKILL)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(*get_batch("train")) / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0 and rank == 0:
        total = loss.item() * gradient_accumulation_steps
        print(f"step {iter_num}: world size {world_size}, loss {total:.4f}", flush=True)
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num}, Path(out_dir) / "ckpt.pt")
    iter_num += 1
if ddp:
    destroy_process_group()
