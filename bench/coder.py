"""What zstd takes of a processor in a step of ResNet-50, and of the images of loaders beside it.

    python -m bench.coder [--sync ef:5:peak] [--ranks 4] [--step 0.123]

Codes are of normal numbers. Loaders, one process a core, read JPEGs of 500 x 375 and scale them to
224; a thread compresses and expands what a rank of so many does in a step of so many seconds, or
does nothing: rounds in turns, each of some seconds.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
from PIL import Image

from bench.codec import bucket_work
from contract.strategies import MIB, parse
from report.published_speeds import PARAMETERS
from tandem.sync.entropy import EntropyCoder


def buckets_of(spec: str, ranks: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Of one bucket the codes for each owner and of its own sum; buckets in a step."""
    values = parse(spec).rule.bucket_mb * MIB // 4
    work = bucket_work(spec, ranks, values)
    coded: Any = work["code"]()
    return coded.coded, work["sum"](), PARAMETERS["resnet50"] / values  # type: ignore[return-value]


def code_step(coder: EntropyCoder, rows: torch.Tensor, total: torch.Tensor, often: float) -> None:
    """What one rank compresses and expands in a step."""
    for _ in range(round(often)):
        messages = [coder.compress(row) for row in rows[1:]]
        messages += [coder.compress(total)] * (len(rows) - 1)
        room = torch.empty_like(total)
        for message in messages:
            coder.begin_expand(message, room).result()


def load(images: Any, ends: Any) -> None:
    """Reads images until `ends`, and counts them."""
    one = Image.effect_noise((500, 375), 60).convert("RGB")
    file = io.BytesIO()
    one.save(file, "JPEG", quality=90)
    while not ends.is_set():
        Image.open(io.BytesIO(file.getvalue())).convert("RGB").resize((224, 224)).tobytes()
        with images.get_lock():
            images.value += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", default="ef:5:peak")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--step", type=float, default=0.123, help="seconds")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, total, often = buckets_of(options.sync, options.ranks)
    images, ends = multiprocessing.Value("q", 0), multiprocessing.Event()
    loaders = [
        multiprocessing.Process(target=load, args=(images, ends))
        for _ in range(os.cpu_count() or 1)
    ]
    for loader in loaders:
        loader.start()
    rates: dict[bool, list[float]] = {False: [], True: []}
    spent = []
    for number in range(2 * options.rounds):
        coder, codes = EntropyCoder(), number % 2 == 1
        began, before = time.monotonic(), images.value
        for step in range(20):
            if codes:
                code_step(coder, rows, total, often)
            time.sleep(max(0.0, began + options.step * (step + 1) - time.monotonic()))
        rates[codes].append((images.value - before) / (time.monotonic() - began))
        if codes:
            spent.append(coder.coding / 20)
        coder.end()
    ends.set()
    for loader in loaders:
        loader.join()
    less = [100 * (1 - coded / plain) for plain, coded in zip(rates[False], rates[True])]
    print(
        f"{options.sync}, {options.ranks} ranks, a step of {options.step} s, {len(loaders)} cores: "
        f"{1e3 * statistics.median(spent):.1f} ms of a core a step for zstd; loaders read "
        f"{statistics.median(rates[False]):.0f} images/s without it, {statistics.median(less):.1f} "
        "% fewer with it (medians of pairs)"
    )


if __name__ == "__main__":
    main()
