"""A prediction on paper: published speeds of one GPU in place of a measured run.

Speeds are images per second in training with fp32, from Lambda's "RTX 2080 Ti Deep Learning
Benchmarks with TensorFlow" (Chuan Li, 2019; TensorFlow 1.12, CUDA 10.0, synthetic images):
https://lambdalabs.com/blog/2080-ti-deep-learning-benchmarks
"""

from __future__ import annotations

from report.errors import ReportError
from report.measure import Step
from trainer import strategies
from trainer.strategies import Payload

SOURCE = "lambdalabs.com/blog/2080-ti-deep-learning-benchmarks"
IMAGES_PER_SECOND = {
    "2080ti": {"resnet50": 294, "resnet152": 110},
    "2080": {"resnet50": 213, "resnet152": 83},
    "1080ti": {"resnet50": 209, "resnet152": 81},
    "titanxp": {"resnet50": 236, "resnet152": 90},
    "titanrtx": {"resnet50": 330, "resnet152": 129},
    "titanv": {"resnet50": 300, "resnet152": 107},
    "v100": {"resnet50": 405, "resnet152": 155},
}
# torchvision's models with 1000 classes.
PARAMETERS = {"resnet50": 25_557_032, "resnet152": 60_192_808}
# Bottleneck blocks of each stage.
BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
BATCH = 64
# Backward's part of forward and backward: it computes gradients of activations and of weights, each
# about as much work as forward.
BACKWARD = 2 / 3


def paper_step(gpu: str, model: str) -> Step:
    """One machine with that GPU. Raises ReportError where no source gives its speed."""
    name = gpu.lower().replace(" ", "").removeprefix("rtx").removeprefix("gtx").lstrip("-_")
    if name not in IMAGES_PER_SECOND:
        known = ", ".join(IMAGES_PER_SECOND)
        raise ReportError(f"--gpu {gpu}: published speeds are known for {known}.")
    speeds = IMAGES_PER_SECOND[name]
    if model not in speeds:
        raise ReportError(
            f"--model {model}: for a GPU on paper, speeds are known for {', '.join(speeds)}."
        )
    spent = BATCH / speeds[model]
    nothing = dict.fromkeys(
        ("data", "h2d", "optimizer", "other", "network", "peers", "checkpoint"), 0.0
    )
    return Step(
        attempt=1,
        nodes=1,
        world=1,
        steps=0,
        images=BATCH,
        payload=Payload(PARAMETERS[model] * 4, matrices=matrices(BLOCKS[model])),
        strategy=strategies.parse(strategies.EXACT),
        forward=spent * (1 - BACKWARD),
        backward=spent * BACKWARD,
        bytes_sent=None,
        link_mbit=None,
        rate=None,
        shared_machine=False,
        ranks=(),
        **nothing,
    )


def matrices(blocks: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Payload.matrices of torchvision's ResNet with so many bottleneck blocks in each stage."""
    found, before = [(64, 3 * 7 * 7, 1)], 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        wide = 4 * width
        found += [(width, before, 1), (wide, before, 1)]  # its shortcut is the second
        found += [(width, wide, count - 1), (width, 9 * width, count), (wide, width, count)]
        before = wide
    return (*found, (1000, before, 1))
