"""`make bench-gpu`: compare our steps with others' on this machine's GPU; bench/performance.md.

`--device cpu` runs a tiny version of all of it, which only shows that the command works.
"""

import argparse
import datetime
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench import gpu_codec, markdown
from bench.gpu_codec import finish, mean_seconds
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
    """How much is measured. `models`: (name, pixels of a side, batch); `seconds`: of each turn of a
    contender; `workers`: numbers of loader processes; `repeats`: of a part of a step; `steps`: of a
    strategy."""

    def __init__(self, device):
        small = device.type == "cpu"
        self.rounds, self.seconds = (2, 0.05) if small else (5, 0.3)
        self.models = [("resnet18", 64, 4)] if small else [("resnet50", 224, 64)]
        self.models.append(("resnet18", 32, 8 if small else 256))
        self.precisions = ["fp32"] if small else ["fp32", "bf16", "O1"]
        self.photographs = 12 if small else 1024
        self.workers = [0, 1] if small else [1, 2, 4, 8, 16]
        self.repeats, self.steps = (3, 2) if small else (200, 30)


def step_rate(contender, setting, seconds):
    """Return the images per second of steps over at least so many seconds."""
    begin, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - begin < seconds:
        contender.step()
        steps += 1
    finish(setting.device)
    return steps * setting.batch / (time.perf_counter() - begin)


def prepare(kind, setting):
    """Return a contender after three steps, in which it compiles and times cuDNN's algorithms."""
    contender = kind(setting)
    contender.synthetic(*setting.pixels())
    for _ in range(3):
        contender.step()
    finish(setting.device)
    return contender


def compare_contenders(setting, scale):
    """Yield a row for each contender: [setting, name, images per second, how many times as fast
    ours is, peak memory]."""
    entrants, peak_bytes = [], []
    on_gpu = setting.device.type == "cuda"
    for kind in contenders():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated() if on_gpu else 0
        entrants.append(prepare(kind, setting))
        peak_bytes.append(peak_memory_bytes(setting.device) - bytes_before)
    rates = [[] for _ in entrants]
    for number in range(scale.rounds):
        # Another contender begins each round, since the first one finds the card cool.
        for place in range(number, number + len(entrants)):
            turn = place % len(entrants)
            rates[turn].append(step_rate(entrants[turn], setting, scale.seconds))
    for contender, theirs, peak in zip(entrants, rates, peak_bytes):
        ratio = statistics.median(our / their for our, their in zip(rates[0], theirs))
        memory = f"{peak / 2**20:.0f} MiB" if on_gpu else ""
        rate = f"{statistics.median(theirs):.0f}"
        yield [str(setting), contender.name, rate, f"{ratio:.2f}", memory]


def settings(device, data, scale):
    """Yield the settings of all rows. Half precision has channels last, as the trainer chooses
    itself. Compiled models come last, since each compilation takes half a minute."""
    for model, size, batch in scale.models:
        for precision in scale.precisions:
            half = precision in AUTOCAST
            yield Setting(device, data, model, size, batch, precision, half, False)
    if device.type == "cuda":
        model, size, batch = scale.models[0]
        for precision in scale.precisions[1:]:
            yield Setting(device, data, model, size, batch, precision, True, True)


def photographs(root, count):
    """Generate JPEGs of 500 x 375 pixels in folders of four classes. Return their ImageFolder."""
    chance = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 4)):
        for index in range(number):
            path = root / split / f"class{index % 4}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            # Patches of color and some noise, so that files have the size of photographs.
            coarse = Image.fromarray(chance.integers(0, 255, (24, 32, 3), dtype=np.uint8))
            pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=int)
            noise = chance.integers(-12, 12, pixels.shape)
            file = io.BytesIO()
            Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG")
            path.write_bytes(file.getvalue())
    return ImageFolder(str(root), "train", Options())


def measure_loader(data, size, scale):
    """Yield a row for each number of loader processes: images per second without training."""
    for workers in scale.workers:
        if workers > (os.cpu_count() or 1):
            continue
        options = Options(workers=workers, image_size=size, augment="crop", jpeg_scaling=True)
        folder = ImageFolder(str(data.root), "train", options)
        batches = TrainBatches(folder, options, World(batches=(4,))).epoch(0)
        next(batches)  # not counted: the processes start
        begin = time.perf_counter()
        count = sum(len(batch.indices) for batch in batches)
        rate = count / (time.perf_counter() - begin)
        yield [f"loader alone, {size} px, {workers} processes", f"{rate:.0f} images/s"]


def measure_from_files(device, data, scale):
    """Yield a row: our steps on batches from files, compared with steps on one batch in memory."""
    model, size, batch = scale.models[0]
    precision = scale.precisions[-1]
    batch = min(batch, len(data) // 2)
    setting = Setting(device, data, model, size, batch, precision, precision in AUTOCAST, False)
    ours = prepare(Tandem, setting)
    synthetic = step_rate(ours, setting, scale.seconds)
    job, count, begin = ours.job, 0, 0.0
    batches = TrainBatches(job.train_set, job.options, job.world)
    for number, loaded in enumerate(batches.epoch(0)):
        train_step(job, loaded, number, 0.01)
        if number == 0:  # not counted: the loader's processes start
            finish(device)
            begin = time.perf_counter()
        else:
            count += len(loaded.indices)
    finish(device)
    rate = count / (time.perf_counter() - begin)
    yield [f"from JPEGs: {setting}", f"{rate:.0f} images/s, {rate / synthetic:.0%} of synthetic"]


def measure_parts(device, data, scale):
    """Yield rows: microseconds of what a step does besides computing, and seconds of a snapshot."""
    model, size, batch = scale.models[0]
    setting = Setting(device, data, model, size, min(batch, 8), "fp32", False, False)
    job = prepare(Tandem, setting).job
    ema = Ema(job.precision.full_state(job.model), 0.999)

    def time_a_step():
        for name in ("h2d", "optimizer", "forward", "backward", "optimizer", "other", "data"):
            job.clock.enter(name)
        job.clock.read(job.clock.lap())

    parts = {
        "clock": time_a_step,
        "EMA": lambda: ema.update(job.precision.live_state(job.model)),
        "seed": lambda: seed_step(job, 1),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(weights_of(job.optimizer), 1.0),
    }
    for name, part in parts.items():
        microseconds = 1e6 * mean_seconds(part, device, scale.repeats)
        yield [f"{name}, {model}", f"{microseconds:.0f} µs a step"]
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), 2)
        for which in ("first", "second"):  # the first one also reserves pinned memory
            begin = time.perf_counter()
            payload = checkpoint.snapshot(job, checkpoint.Position.of_new_run(job.world))
            writer.save(payload, False, checkpoint.make_copy_waiter(device))
            free = time.perf_counter() - begin
            writer.finish()
            written = time.perf_counter() - begin
            figure = f"the loop waits {free:.3f} s, written after {written:.2f} s"
            yield [f"{which} snapshot", figure]


def contender_table(rows):
    """Return the rows of compare_contenders as a table with a line for each setting. `all` as a
    contender's name: the setting failed."""
    names = list(dict.fromkeys(name for _, name, *_ in rows if name != "all"))
    lines = {}
    for setting, name, rate, ratio, memory in rows:
        # Ours is the first contender, so the line begins with our memory.
        line = lines.setdefault(setting, [setting, *["-"] * len(names), memory])
        place = 1 + names.index(name) if name in names else 1
        line[place] = f"{rate} ({ratio})" if place > 1 else rate
    return markdown.table(["step, images/s", *names, "our peak memory"], lines.values())


def measure(device, scale):
    """Return the text of all tables. Each row is also printed as soon as it is there."""
    contender_rows, part_rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = photographs(Path(folder), scale.photographs)
        for setting in settings(device, data, scale):
            rows = compare_contenders(setting, scale)
            contender_rows += collect(rows, [str(setting), "all"], ["", ""])
        for rows in (
            measure_loader(data, scale.models[0][1], scale),
            measure_from_files(device, data, scale),
            measure_parts(device, data, scale),
            gpu_codec.measure_codec(device, scale),
            gpu_codec.measure_links(device, scale),
        ):
            part_rows += collect(rows, [rows.__name__])
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    date = datetime.datetime.now(datetime.timezone.utc).date()
    title = f"{name}, torch {torch.__version__}, {os.cpu_count()} cores, {date}"
    parts = markdown.table(["part", "figure"], part_rows)
    title += f"; medians of {scale.rounds} rounds in turns"
    return f"{title}\n\n{contender_table(contender_rows)}\n\n{parts}"


def collect(rows, before, after=()):
    """Return a measurement's rows, and print each as soon as it is there. If the measurement fails,
    its last row has the error between the cells `before` and `after`."""
    collected = []
    try:
        for row in rows:
            print(*row, sep="  ", flush=True)
            collected.append(row)
    except Exception as error:  # a compilation may raise anything
        text = "does not fit into memory"
        if not is_out_of_memory(error):
            message = f"{type(error).__name__}: {' '.join(str(error).split()).replace('|', '/')}"
            print(f"failed: {message[:500]}", file=sys.stderr)
            text = f"failed: {message[:100]}"
        collected.append([*before, text, *after])
    return collected


def main(argv):
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    # The first GPU by its number: a snapshot waits for a GPU, not for a kind of device.
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
    text = measure(device, Scale(device))
    if device.type == "cuda":
        markdown.replace_part(PAGE, BEGIN, END, text)
        print(f"written to {PAGE}")
    else:
        print(f"\n{text}\n\na tiny version on the CPU: it works, and its figures mean nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
