"""`make bench-gpu`: our steps beside others' on this machine's GPU, in turns; bench/performance.md.

`--device cpu` runs a tiny version of all of it, which shows that the command works, and no more.
"""

import argparse
import dataclasses
import datetime
import io
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench import gpu_codec
from bench.gpu_peers import AUTOCAST, Setting, Tandem, contenders
from contract.options import Options
from tandem.process_facts import peak_memory_bytes
from trainer import checkpoint
from trainer.data.folder import ImageFolder
from trainer.data.loader import TrainBatches
from trainer.ema import Ema
from trainer.memory import is_out_of_memory
from trainer.precision import weights_of
from trainer.step import seed_step, train_step
from trainer.world import World
from trainer.writer import Writer

PAGE = Path(__file__).resolve().parents[1] / "bench/performance.md"
BEGIN, END = "<!-- make bench-gpu: begin -->", "<!-- make bench-gpu: end -->"


class Scale:
    """How much is measured."""

    def __init__(self, device):
        small = device.type == "cpu"
        self.rounds, self.seconds = (2, 0.05) if small else (5, 0.3)
        self.models = [("resnet18", 64, 4)] if small else [("resnet50", 224, 64)]
        self.models.append(("resnet18", 32, 8 if small else 256))
        self.precisions = ["fp32"] if small else ["fp32", "bf16", "O1"]
        self.photographs = 12 if small else 1024
        self.workers = [0, 1] if small else [1, 2, 4, 8, 16]
        self.repeats, self.steps = (3, 2) if small else (200, 30)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def rate(contender, setting, seconds):
    """Images a second over at least so many seconds, everything on the device done."""
    begin, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - begin < seconds:
        contender.step()
        steps += 1
    wait(setting.device)
    return steps * setting.batch / (time.perf_counter() - begin)


def beside(setting, scale):
    """A line of the table for each contender: images/s, its ratio to ours, peak memory."""
    pixels, made, peaks = setting.pixels(), [], []
    for kind in contenders():
        before = begin_peak(setting.device)
        contender = kind(setting)
        contender.synthetic(*pixels)
        for _ in range(3):  # compiles, and times cuDNN's algorithms
            contender.step()
        wait(setting.device)
        made.append(contender)
        peaks.append(peak_memory_bytes(setting.device) - before)
    rates = [[] for _ in made]
    for number in range(scale.rounds):
        for place in range(len(made)):
            which = (place + number) % len(made)  # nobody is always first, when the card is cool
            rates[which].append(rate(made[which], setting, scale.seconds))
    for contender, own, grown in zip(made, rates, peaks):
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates[0], own))
        most = f"{grown / 2**20:.0f} MiB" if setting.device.type == "cuda" else ""
        yield [str(setting), contender.name, f"{statistics.median(own):.0f}", f"{ratio:.2f}", most]


def begin_peak(device):
    """Bytes that are taken on a GPU; its peak is counted from here on."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def settings(device, data, scale):
    """In half precision by channels last, as the trainer does by itself. What is compiled comes
    last, since each compilation takes half a minute."""
    for model, size, batch in scale.models:
        for precision in scale.precisions:
            half = precision in AUTOCAST
            yield Setting(device, data, model, size, batch, precision, half, False)
    if device.type == "cuda":
        model, size, batch = scale.models[0]
        for precision in scale.precisions[1:]:
            yield Setting(device, data, model, size, batch, precision, True, True)


def photographs(root, count):
    """Class folders with JPEGs of 500 x 375 pixels, generated."""
    draw = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 4)):
        for index in range(number):
            path = root / split / f"class{index % 4}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(draw.integers(0, 255, (24, 32, 3), dtype=np.uint8))
            pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=int)
            noise = draw.integers(-12, 12, pixels.shape)
            file = io.BytesIO()
            Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG")
            path.write_bytes(file.getvalue())
    return ImageFolder(str(root), "train", Options())


def loader_alone(data, size, scale):
    """Images a second of our loader by its number of processes; the first batch is not counted."""
    for workers in scale.workers:
        if workers > (os.cpu_count() or 1):
            continue
        options = Options(workers=workers, image_size=size, augment="crop", jpeg_scaling=True)
        folder = ImageFolder(str(data.root), "train", options)
        batches = TrainBatches(folder, options, World(batches=(4,))).epoch(0)
        next(batches)
        begin = time.perf_counter()
        count = sum(len(batch.indices) for batch in batches)
        spent = time.perf_counter() - begin
        yield [f"loader alone, {size} px, {workers} processes", f"{count / spent:.0f} images/s"]


def fed(device, data, scale):
    """Our steps from files, against the same steps on one batch; also with a prefetcher, which the
    trainer does not have."""
    model, size, batch = scale.models[0]
    precision = scale.precisions[-1]
    batch = min(batch, len(data) // 2)
    setting = Setting(device, data, model, size, batch, precision, precision in AUTOCAST, False)
    ours = Tandem(setting)
    ours.synthetic(*setting.pixels())
    for _ in range(3):
        ours.step()
    synthetic = rate(ours, setting, scale.seconds)
    batches = TrainBatches(ours.job.train_set, ours.job.options, ours.job.world)
    ways = ("from JPEGs", lambda made: made), ("copied ahead on a side stream", ahead(device))
    for number, (name, way) in enumerate(ways):
        from_files = fed_rate(ours.job, way(batches.epoch(number)))
        share = f"{from_files:.0f} images/s, {from_files / synthetic:.0%} of synthetic"
        yield [f"{name}: {setting}", share]


def fed_rate(job, batches):
    """Images a second of steps on these batches, from the second on: processes are there then."""
    counted, begin = 0, 0.0
    for number, batch in enumerate(batches):
        train_step(job, batch, number, 0.01)
        if number == 0:
            wait(job.world.device)
            begin = time.perf_counter()
        else:
            counted += len(batch.indices)
    wait(job.world.device)
    return counted / (time.perf_counter() - begin)


def ahead(device):
    """A prefetcher: batches that are on the device, each copied there while the step before it
    computes."""
    side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def moved(batch):
        with torch.cuda.stream(side):  # None changes nothing
            images, targets = batch.copy_to(device)
            there = side.record_event() if side else None
        return dataclasses.replace(batch, images=images, targets=targets), there

    def handed_over(batch, there):
        if side:
            own = torch.cuda.current_stream(device)
            own.wait_event(there)
            batch.images.record_stream(own)
            batch.targets.record_stream(own)
        return batch

    def way(batches):
        coming = moved(next(batches))
        for batch in batches:
            ready, coming = coming, moved(batch)
            yield handed_over(*ready)
        yield handed_over(*coming)

    return way


def parts(device, data, scale):
    """Microseconds a step of what a step does beside computing, and seconds of a snapshot."""
    model, size, batch = scale.models[0]
    ours = Tandem(Setting(device, data, model, size, min(batch, 8), "fp32", False, False))
    ours.synthetic(
        *Setting(device, data, model, size, min(batch, 8), "fp32", False, False).pixels()
    )
    ours.step()
    job, clock = ours.job, ours.job.clock
    ema = Ema(job.precision.full_state(job.model), 0.999)
    names = ("h2d", "optimizer", "forward", "backward", "optimizer", "other", "data")
    done = {
        "clock": lambda: clock.read(clock.lap()) if [clock.enter(n) for n in names] else None,
        "EMA": lambda: ema.update(job.precision.live_state(job.model)),
        "seed": lambda: seed_step(job, 1),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(weights_of(job.optimizer), 1.0),
    }
    for name, call in done.items():
        call()
        wait(device)
        begin = time.perf_counter()
        for _ in range(scale.repeats):
            call()
        wait(device)
        spent = (time.perf_counter() - begin) / scale.repeats
        yield [f"{name}, {model}", f"{spent * 1e6:.0f} µs a step"]
    yield from snapshot(job, device)


def snapshot(job, device):
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), 2)
        for which in ("first", "second"):  # the first one makes room in pinned memory
            begin = time.perf_counter()
            payload = checkpoint.snapshot(job, checkpoint.Position.of_new_run(job.world))
            writer.save(payload, False, checkpoint.make_copy_waiter(device))
            free = time.perf_counter() - begin
            writer.finish()
            written = time.perf_counter() - begin
            yield [
                f"{which} snapshot",
                f"the loop waits {free:.3f} s, written after {written:.2f} s",
            ]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def beside_each_other(rows):
    """A line for each step: images/s of each contender, in brackets by how much ours is faster,
    and ours peak memory."""
    names = list(dict.fromkeys(by for _, by, *_ in rows if by != "all"))
    lines = {}
    for step, by, rate, ratio, memory in rows:
        line = lines.setdefault(step, [step, *["-"] * len(names), memory])
        place = 1 + names.index(by) if by in names else 1  # ours is the first
        line[place] = f"{rate} ({ratio})" if place > 1 else rate
    return table(["step, images/s", *names, "our peak memory"], lines.values())


def measured(device, scale):
    """The text of all tables; each row is printed when it is there."""
    with tempfile.TemporaryDirectory() as folder:
        data = photographs(Path(folder), scale.photographs)
        steps, others = [], []
        for setting in settings(device, data, scale):
            try:
                for row in beside(setting, scale):
                    print(*row, sep="  ", flush=True)
                    steps.append(row)
            except Exception as error:  # a compilation may raise anything
                steps.append([str(setting), "all", failure(error), "", ""])
        sources = (loader_alone(data, scale.models[0][1], scale), fed(device, data, scale),
                   parts(device, data, scale), gpu_codec.codec(device, scale),
                   gpu_codec.linked(device, scale))  # fmt: skip
        for source in sources:
            try:
                for row in source:
                    print(*row, sep="  ", flush=True)
                    others.append(row)
            except Exception as error:
                others.append([source.__name__, failure(error)])
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    date = datetime.datetime.now(datetime.timezone.utc).date()
    title = f"{name}, torch {torch.__version__}, {os.cpu_count()} cores, {date}"
    title += f"; medians of {scale.rounds} rounds in turns"
    return f"{title}\n\n{beside_each_other(steps)}\n\n{table(['part', 'figure'], others)}"


def failure(error):
    """One failure costs its rows, and not the tables."""
    if is_out_of_memory(error):
        return "does not fit into memory"
    message = " ".join(str(error).split()).replace("|", "/")
    print(f"failed: {type(error).__name__}: {message[:500]}", file=sys.stderr)
    return f"failed: {type(error).__name__}: {message[:100]}"


def write(text):
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    PAGE.write_text(re.sub(pattern, lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.S), "utf-8")


def main(argv):
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    # The first card by its number: a snapshot waits for a card, not for a kind of device.
    device = torch.device(parser.parse_args(argv).device, 0)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"tandem: torch {torch.__version__} of {sys.executable} sees no GPU: see what "
            "nvidia-smi says, name another Python by PYTHON=<its path>, or see that the command "
            "works: DEVICE=cpu.",
            file=sys.stderr,
        )
        return 2
    missing = [] if len(contenders()) > 3 else ["timm is not installed: its loop is left out"]
    print(*missing, sep="\n")
    text = measured(device, Scale(device))
    if device.type == "cuda":
        write(text)
        print(f"written to {PAGE}")
    else:
        print(f"\n{text}\n\na tiny version on the CPU: it works, and its figures mean nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
