"""A small language model of Python's own sources, trained with AdamW.

adamw.py makes its runs, each of which is one line of text.jsonl. Ranks are threads of one process
(one_process.py), and no step but the first is exact. Tokens are the characters of the standard
library.

Lines whose `gloo` is true: their ranks were processes with DDP and `tandem.sync.attach`. Their
sums are the same to the bit (test_one_process.py); the code is in commit 61a15b81.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import one_process
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contract.strategies import ADAM
from tandem import sync

LINES = Path(__file__).with_name("text.jsonl")
WIDTH, LAYERS, HEADS, CONTEXT = 64, 4, 4, 64
BATCH, STEPS, WARMUP, LR = 32, 1200, 100, 0.002  # BATCH: sequences of all ranks together
TOKENS = 128  # the most frequent characters, and one token for all others
VALIDATION_SHAPE = (64, 64)  # batches, and sequences in each


@functools.cache
def read_tokens() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (tokens to train on, tokens to validate on, number of different tokens)."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    frequent = Counter(character for text in texts for character in text).most_common(TOKENS - 1)
    number = {character: place for place, (character, _) in enumerate(frequent, 1)}
    files = [[number.get(character, 0) for character in text] for text in texts]
    # Each tenth file is for validation.
    train = [token for place, file in enumerate(files) if place % 10 for token in file]
    validation = [token for file in files[::10] for token in file]
    return torch.tensor(train), torch.tensor(validation), len(number) + 1


class Block(nn.Module):
    """A layer of the transformer: causal attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        parts = self.queries_keys_values(self.norms[0](x)).chunk(3, 2)
        heads = [part.view(shape).transpose(1, 2) for part in parts]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.wide(self.norms[1](x))


class Gpt(nn.Module):
    """0.24 million parameters."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, tokens, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.blocks(self.token(tokens) + self.place(places)))


def loss_of(model: nn.Module, tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the sequences of CONTEXT tokens that begin at these places."""
    batch = tokens[begins[:, None] + torch.arange(CONTEXT + 1)]
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train_rank(case: dict[str, Any], rank: int) -> float:
    """Train one rank of a run. Return the validation loss (0.0 on all ranks but the first)."""
    train_tokens, validation_tokens, token_count = read_tokens()
    torch.manual_seed(case["seed"])
    model = Gpt(token_count)
    weights = list(model.parameters())
    decay = [weight for weight in weights if weight.dim() > 1]
    rest = [weight for weight in weights if weight.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    strategy = sync.make(sync.effective_spec(case["sync"], range(case["ranks"]), ADAM))
    strategy.setup(torch.device("cpu"))
    order = torch.Generator().manual_seed(case["seed"])
    for step in range(case["steps"]):
        # After its rise, the rate falls as a cosine to a tenth.
        rise, fall = min(1, (step + 1) / WARMUP), math.cos(math.pi * step / case["steps"])
        for group in optimizer.param_groups:
            group["lr"] = case["lr"] * rise * (0.55 + 0.45 * fall)
        # All ranks draw the same sequences, and each takes its part of them.
        begins = torch.randint(len(train_tokens) - CONTEXT, (BATCH,), generator=order)
        loss = loss_of(model, train_tokens, begins[rank :: case["ranks"]])
        optimizer.zero_grad()
        loss.backward()
        strategy.begin(1.0, exact=step == 0)
        bucket = one_process.Bucket.of(weights[::-1])
        bucket.flat.copy_(strategy.hook(bucket).wait())
        bucket.write_gradients()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    if rank > 0:
        return 0.0
    # All runs validate on the same sequences.
    fixed = torch.Generator().manual_seed(0)
    batches = torch.randint(len(validation_tokens) - CONTEXT, VALIDATION_SHAPE, generator=fixed)
    with torch.no_grad():
        losses = [loss_of(model, validation_tokens, begins).item() for begins in batches]
    return sum(losses) / len(losses)


def case(spec: str, seed: int, gloo: bool = False) -> dict[str, Any]:
    """Return a run as its line begins. `gloo`: of the runs whose ranks were processes."""
    usual = {"ranks": 2, "steps": STEPS, "lr": LR, "words": False, "gloo": gloo}
    return {"sync": spec, "seed": seed, **usual}


def read_runs(file: Path) -> list[dict[str, Any]]:
    """Return the lines of the finished runs."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses_of(lines: list[dict[str, Any]], spec: str, gloo: bool = False) -> dict[int, float]:
    """Return {seed: validation loss} of a strategy's finished runs."""
    usual = case(spec, 0, gloo)
    del usual["seed"]
    return {line["seed"]: line["loss"] for line in lines if usual.items() <= line.items()}


def train_case(case: dict[str, Any]) -> dict[str, Any]:
    """Train a run. Return its line of text.jsonl."""
    began, cpu_began = time.monotonic(), time.process_time()
    with one_process.wired():
        losses = one_process.run_ranks(case["ranks"], functools.partial(train_rank, case))
    return {
        **case,
        "loss": round(losses[0], 5),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
        "python": platform.python_version(),
    }
