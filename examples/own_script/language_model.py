"""A small language model in plain PyTorch: DistributedDataParallel, AdamW, two micro-batches a step
by no_sync, and a resume that is the same to the bit. It reads Python's own library, byte by byte.

python -m torch.distributed.run --nproc_per_node=2 language_model.py --steps 200
"""

import argparse
import contextlib
import os
import sysconfig
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

LENGTH, WIDTH, MICRO_BATCHES, BATCH = 64, 64, 2, 8  # BATCH: texts of a micro-batch and rank
FILES = ("argparse.py", "ast.py", "textwrap.py", "typing.py")
SAVED = Path("checkpoints")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--sync", help="a strategy of tandem.sync; with AdamW bf16 is one")
parser.add_argument("--resume", help="a checkpoint to go on from")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(block, 2), nn.Linear(WIDTH, 256)
        later = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH, device=text.device)
        hidden = self.bytes(text) + self.places(places)
        return self.head(self.blocks(hidden, mask=self.later))


on_gpu = torch.cuda.is_available()
distributed.init_process_group("nccl" if on_gpu else "gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
library = Path(sysconfig.get_paths()["stdlib"])
text = torch.tensor(list(b"".join((library / name).read_bytes() for name in FILES)))


def batch(step: int, part: int) -> torch.Tensor:
    """Texts with the byte that follows each; what a rank reads in a step follows from its number,
    so a run that goes on reads what it would have read."""
    number = (step * MICRO_BATCHES + part) * world + rank
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draw)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(device)


def loss_of(texts: torch.Tensor) -> torch.Tensor:
    logits = model(texts[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
first = 0
if options.resume:
    saved = torch.load(options.resume, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
attached = None
if options.sync:
    from tandem import sync

    attached = sync.attach(model, options.sync)
    attached.warm_up_buckets(lambda: loss_of(batch(0, 0)).backward())


def own(step: int) -> Path:
    """What a rank keeps for its sums: on its own machine, by the step that it belongs to."""
    return SAVED / f"rank{rank}-{step:06}.pt"


if attached and options.resume:
    attached.load_state_dict(torch.load(own(first), map_location=device))


def save(state: dict, path: Path) -> None:
    """Whole or not at all."""
    fresh = path.with_suffix(".fresh")
    torch.save(state, fresh)
    fresh.rename(path)


SAVED.mkdir(exist_ok=True)
for step in range(first, options.steps):
    optimizer.zero_grad()
    for part in range(MICRO_BATCHES):
        last = part == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(batch(step, part)) / MICRO_BATCHES
            loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {MICRO_BATCHES * loss.item()!r}", flush=True)
    if (step + 1) % options.save_every == 0:
        if attached:
            save(attached.state_dict(), own(step + 1))
        distributed.barrier()  # a checkpoint is there once every rank has what belongs to it
        if rank == 0:
            weights = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            save({**weights, "step": step + 1}, SAVED / f"step-{step + 1:06}.pt")

distributed.destroy_process_group()
