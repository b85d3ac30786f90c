"""python -m bench.finetune: the digits 5 to 9 from few images, by weights of a net that was trained
on 0 to 4, against a net that begins anew; prints a table.

Also from a file as torchvision makes them, of 1,000 classes; and each kind once more, resumed in
the middle, which has to be equal to the bit.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torchvision

IMAGES = 20  # a class, of 5 to 9
SEEDS = (0, 1)
COMMON = ["--model", "resnet18", "--precision", "fp32", "--workers", "0", "--progress", "plain"]
FEW = ["--epochs", "10", "--per_node_batch_size", "20", "--lr", "0.02", "--warmup_epochs", "1"]
KINDS = {
    "anew": [],
    "anew, rate 0.1": ["--lr", "0.1"],
    "weights": ["--weights", "{own}"],
    "weights, faster head": ["--weights", "{own}", "--head_lr", "10"],
    "weights, frozen backbone": ["--weights", "{own}", "--freeze", "backbone", "--head_lr", "10"],
    "a torchvision file": ["--weights", "{torchvision}"],
}


def subset(source: Path, to: Path, classes: str, most: int | None) -> Path:
    """Links to the images of some classes, the first `most` of each to train on."""
    for split, count in (("train", most), ("val", None)):
        for name in classes:
            folder = to / split / name
            folder.mkdir(parents=True)
            for image in sorted((source / split / name).iterdir())[:count]:
                (folder / image.name).symlink_to(image.resolve())
    return to


def train(data: Path, output: Path, *words: str) -> list[float]:
    """The top-1 of each epoch."""
    argv = [sys.executable, "-m", "trainer", "--data", str(data), "--output", str(output)]
    done = subprocess.run([*argv, *COMMON, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    log = sorted(output.glob("nodes/*/rank0*.steps.jsonl"))[-1]
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [line["top1"] for line in lines if line["kind"] == "evaluate"]


def model(output: Path) -> dict[str, torch.Tensor]:
    path = sorted(output.glob("checkpoints/*/step-*.pt"))[-1]
    return torch.load(path, weights_only=True)["model"]


def resumed_equal(data: Path, output: Path, words: list[str]) -> bool:
    """Whether a run that lost all but a checkpoint in the middle of an epoch ends as it ended."""
    wanted = model(output)
    shutil.rmtree(output)
    often = [*words, "--checkpoint_every", "7", "--keep", "99"]
    train(data, output, *often)
    for path in output.glob("checkpoints/*/*.pt"):
        if path.name != "step-00000021.pt":
            path.unlink()
    train(data, output, *often, "--resume", "auto")
    ours = model(output)
    return all(torch.equal(ours[name], wanted[name]) for name in wanted)


def main() -> None:
    source, root = Path("data/digits"), Path(tempfile.mkdtemp(prefix="finetune-"))
    first = subset(source, root / "0-4", "01234", None)
    few = subset(source, root / "5-9", "56789", IMAGES)
    print("0 to 4:", train(first, root / "first", "--epochs", "8", "--lr", "0.02")[-1], flush=True)
    own = next((root / "first").glob("checkpoints/*/best.pt"))
    state = torchvision.models.resnet18(weights=None).state_dict()
    state.update({name: one for name, one in model(root / "first").items() if "fc." not in name})
    torch.save(state, root / "resnet18-00000000.pth")
    files = {"own": own, "torchvision": root / "resnet18-00000000.pth"}
    print("| 5 to 9 from | top-1 after 1 epoch | 3 | 10 | resumed: equal |\n|---|---|---|---|---|")
    for kind, more in KINDS.items():
        words = [*FEW, *(word.format(**files) for word in more)]
        runs = [train(few, root / kind / str(n), *words, "--seed", str(n)) for n in SEEDS]
        equal = resumed_equal(few, root / kind / "0", [*words, "--seed", "0"])
        means = [f"{100 * statistics.mean(run[n - 1] for run in runs):.1f} %" for n in (1, 3, 10)]
        print(f"| {kind} | {' | '.join(means)} | {'yes' if equal else 'NO'} |", flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
