"""A small language model of Python's own sources, trained with AdamW.

    python bench/accuracy/text.py --sync allreduce ef:5 --seeds 1 2 3 --lines FILE

Ranks are processes with DDP and `tandem.sync.attach` over Gloo, as in anybody's script, or with
--threads those of one process (one_process.py). Each rank counts as a machine, and no step but the
first is exact. Text and validation are files of the standard library; tokens are its characters,
or with --words the 8,000 most frequent words, most of which are rare. Each finished run is one line
of a file, and a run that stands there is not repeated.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import re
import socket
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import one_process  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from contract.strategies import ADAM  # noqa: E402
from tandem import sync  # noqa: E402

LINES = Path(__file__).with_name("text.jsonl")
WIDTH, LAYERS, HEADS, CONTEXT = 64, 4, 4, 64
BATCH, STEPS, WARMUP, LR = 32, 1200, 100, 0.002  # of all ranks together
WORDS, CHARACTERS, VALIDATED = 8000, 128, 64


@functools.cache
def text(words: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens to train on, those to validate on, and how many there are."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    tokens = [re.findall(r"\w+|\s+|[^\w\s]", part) if words else [*part] for part in parts]
    most = Counter(one for part in tokens for one in part).most_common(
        (WORDS if words else CHARACTERS) - 1
    )
    number = {one: place for place, (one, _) in enumerate(most, 1)}
    coded = [[number.get(one, 0) for one in part] for part in tokens]
    halves = [
        torch.tensor([one for part in some for one in part])
        for some in ([p for n, p in enumerate(coded) if n % 10], coded[::10])
    ]
    return halves[0], halves[1], len(number) + 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (p.view(shape).transpose(1, 2) for p in self.attend(self.norms[0](x)).chunk(3, 2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.wide(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, tokens, bias=False)
        for one in (self.token, self.place):
            nn.init.normal_(one.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.blocks(self.token(tokens) + self.place(places)))


def loss_of(model: nn.Module, every: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    taken = every[begins[:, None] + torch.arange(CONTEXT + 1)]
    return cross_entropy(model(taken[:, :-1]).flatten(0, 1), taken[:, 1:].flatten())


class Training:
    """One rank's, whose gradients `summed` makes the mean of all ranks' before each step."""

    def __init__(self, case: dict[str, Any], rank: int) -> None:
        self.case, self.rank = case, rank
        self.train_text, self.val_text, tokens = text(case["words"])
        torch.manual_seed(case["seed"])
        self.model = Gpt(tokens)
        self.called: nn.Module = self.model
        decay = [one for one in self.model.parameters() if one.dim() > 1]
        rest = [one for one in self.model.parameters() if one.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def steps(self, summed: Callable[[int], None]) -> None:
        order, case = torch.Generator().manual_seed(self.case["seed"]), self.case
        for step in range(case["steps"]):
            rise, fall = min(1, (step + 1) / WARMUP), math.cos(math.pi * step / case["steps"])
            for group in self.optimizer.param_groups:
                group["lr"] = case["lr"] * rise * (0.55 + 0.45 * fall)
            begins = torch.randint(len(self.train_text) - CONTEXT, (BATCH,), generator=order)
            loss = loss_of(self.called, self.train_text, begins[self.rank :: case["ranks"]])
            self.optimizer.zero_grad()
            loss.backward()
            summed(step)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        fixed = torch.Generator().manual_seed(0)
        places = torch.randint(len(self.val_text) - CONTEXT, (VALIDATED, 64), generator=fixed)
        losses = [loss_of(self.model, self.val_text, begins).item() for begins in places]
        return sum(losses) / len(losses)


def as_process(rank: int, port: int, case: dict[str, Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=case["ranks"])
    mine = Training(case, rank)
    mine.called = ddp = DistributedDataParallel(mine.model)
    sync.attach(ddp, case["sync"], machines=range(case["ranks"]), optimizer=mine.optimizer)
    mine.steps(lambda step: None)
    if rank == 0:
        pipe.send(mine.loss())
    dist.barrier()
    os._exit(0)


def by_processes(case: dict[str, Any]) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours, theirs = torch.multiprocessing.Pipe()
    started = [
        torch.multiprocessing.Process(target=as_process, args=(rank, port, case, theirs))
        for rank in range(case["ranks"])
    ]
    for one in started:
        one.start()
    theirs.close()
    loss = float(ours.recv())
    for one in started:
        one.join()
    return loss


def by_threads(case: dict[str, Any]) -> float:
    """The same sums, to the bit (test_one_process.py)."""

    def rank_main(rank: int) -> float:
        mine = Training(case, rank)
        spec = sync.effective_spec(case["sync"], range(case["ranks"]), ADAM)
        strategy = sync.make(spec)
        strategy.setup(torch.device("cpu"))
        weights = list(mine.model.parameters())[::-1]

        def summed(step: int) -> None:
            strategy.begin(1.0, exact=step == 0)
            flat = torch.cat([one.grad.reshape(-1) for one in weights])
            bucket = one_process.Bucket(weights, flat)
            flat.copy_(strategy.hook(bucket).wait())
            for one, gradient in zip(weights, bucket.gradients()):
                one.grad.copy_(gradient)

        mine.steps(summed)
        return mine.loss() if rank == 0 else 0.0

    with one_process.wired():
        return one_process.run_ranks(case["ranks"], rank_main)[0]


def case(spec: str, seed: int, **more: Any) -> dict[str, Any]:
    """A run, as its line begins."""
    usual = {"ranks": 2, "steps": STEPS, "lr": LR, "words": False, "gloo": True}
    return {"sync": spec, "seed": seed, **usual, **more}


def known(file: Path) -> list[dict[str, Any]]:
    """The runs that are finished."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def carry_out(case: dict[str, Any]) -> dict[str, Any]:
    began, cpu = time.monotonic(), time.process_time()
    loss = (by_processes if case["gloo"] else by_threads)(case)
    spent = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
    spent = {name: round(value, 1) for name, value in spent.items()}
    return {**case, "loss": round(loss, 5), **spent, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--threads", dest="gloo", action="store_false", help="no processes")
    parser.add_argument("--lines", type=Path, default=LINES, help="file of finished runs")
    options = parser.parse_args()
    same = {name: getattr(options, name) for name in ("ranks", "steps", "lr", "words", "gloo")}
    for seed in options.seeds:
        for spec in options.sync:
            asked = case(spec, seed, **same)
            if any(asked.items() <= line.items() for line in known(options.lines)):
                continue
            line = json.dumps(carry_out(asked))
            with options.lines.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
