"""Images per second of a processor: training by `python -m trainer` and by torchvision's reference
loop, from JPEGs on a disk, with the same recipe, in turns.

    python -m bench.loop

Processor time does not hang on what else the machine does as its clock does. That of a run is of
all its processes, loaders too; what starting takes is left out, as the difference between a run of
many epochs and one of one.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from bench.decoding import photograph
from trainer.models import build

CLASSES, TRAIN, VAL = 8, 32, 1  # images of each class
EPOCHS, ROUNDS, BATCH, WORKERS = 4, 3, 32, 2
# What is trained, and the pixels of a crop: with the second nearly all is reading, as with a GPU.
MODELS = {"resnet18": 64, "examples.small_cnn:small_cnn": 224}
WAYS = {
    "torchvision's loop": None,
    "trainer, every pixel decoded": ["--jpeg_scaling", "false"],
    "trainer": [],
}


def draw(folder: Path) -> None:
    for split, count in ("train", TRAIN), ("val", VAL):
        for number in range(CLASSES):
            (folder / split / str(number)).mkdir(parents=True)
            for image in range(count):
                content = photograph(500, 375, 70, number * TRAIN + image)
                (folder / split / str(number) / f"{image}.jpg").write_bytes(content)


def train_as_torchvision(folder: Path, name: str, epochs: int) -> None:
    """references/classification/train.py with its usual preset, without its evaluation."""
    steps = [v2.RandomResizedCrop(MODELS[name], antialias=True), v2.RandomHorizontalFlip()]
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    steps += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), v2.ToPureTensor()]
    images = datasets.ImageFolder(str(folder / "train"), v2.Compose(steps))
    loader = DataLoader(images, BATCH, shuffle=True, num_workers=WORKERS)
    model = build(name, CLASSES, MODELS[name]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for batch, targets in loader:
            outputs = model(batch)
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            best = outputs.topk(5).indices.eq(targets[:, None])
            (loss.item(), best[:, :1].sum().item(), best.sum().item())


def processor_seconds(argv: list[str]) -> float:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run([sys.executable, "-m", *argv], check=True, stdout=subprocess.DEVNULL)
    return spent() - before


def images_per_second(folder: Path, name: str, more: list[str] | None) -> float:
    seconds = []
    for epochs in 1, EPOCHS:
        argv = ["bench.loop", str(folder), name, str(epochs)]
        if more is not None:
            argv = ["trainer", "--data", str(folder), "--model", name, "--epochs", str(epochs)]
            argv += ["--output", tempfile.mkdtemp(dir=folder), "--workers", str(WORKERS), *more]
            argv += ["--per_node_batch_size", str(BATCH), "--image_size", str(MODELS[name])]
            argv += ["--precision", "fp32", "--evaluate_every", "99", "--progress", "plain"]
        seconds.append(processor_seconds(argv))
    return CLASSES * TRAIN * (EPOCHS - 1) / (seconds[1] - seconds[0])


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        train_as_torchvision(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        return
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        draw(folder)
        for name, pixels in MODELS.items():
            speeds: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(ROUNDS):
                for way, more in WAYS.items():
                    speeds[way].append(images_per_second(folder, name, more))
            print(f"{name}, crops of {pixels} pixels: images per second of a processor")
            peer = next(iter(speeds.values()))
            for way, own in speeds.items():
                ratio = median(ours / theirs for ours, theirs in zip(own, peer))
                print(f"    {median(own):6.1f}  {ratio:.2f} x  {way}", flush=True)


if __name__ == "__main__":
    main()
