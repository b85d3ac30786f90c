"""How many of `ef:3`'s codes are zero in a run on glyphs, and what a lossless packing could save.

    python bench/accuracy/entropy.py

Of each step, over all ranks: of the gradients' codes, and of the sums'. The entropy is that of one
level by itself; a packing that knew its neighbours could take less, any other one takes more.
"""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import study  # noqa: E402
import torch  # noqa: E402

from tandem.sync.codec import Codec  # noqa: E402
from tandem.sync.feedback import ErrorFeedback  # noqa: E402

SHOWN = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the run


def bits(zeros: float) -> float:
    """Of a level that is zero so often, and otherwise -1 as often as 1."""
    rest = 1 - zeros
    return -zeros * math.log2(zeros) - rest * math.log2(rest / 2)


def count(found: dict[str, list[float]]) -> None:
    """From here on, each coding notes its share of zeros in `found`."""
    real_levels, real_sum = Codec._levels, ErrorFeedback._sum
    kind = threading.local()

    def levels(self: Codec, scaled: torch.Tensor, step: torch.Tensor, own: bool) -> torch.Tensor:
        made = real_levels(self, scaled, step, own)
        used = made[step.view(-1) > 0]  # what fills up a part is all zeros
        found[getattr(kind, "of", "gradients")].append(float((used == 0).float().mean()))
        return made

    def summed(self: ErrorFeedback, *given: Any) -> torch.Tensor:
        kind.of = "sums"
        made = real_sum(self, *given)
        kind.of = "gradients"
        return made

    Codec._levels, ErrorFeedback._sum = levels, summed  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    case = study.Case(study.CODED, 1)
    found: dict[str, list[float]] = {"gradients": [], "sums": []}
    count(found)
    study.carry_out(case, study.images(study.GLYPHS, 1))
    print("| after steps | codes of | zeros | bits a value |\n|---|---|---|---|")
    for kind, shares in found.items():
        for part in SHOWN:
            end = round(part * len(shares))
            last = shares[max(0, end - len(shares) // 20) : end]
            zeros = sum(last) / len(last)
            print(f"| {part * 1000:.0f} | {kind} | {zeros:.3f} | {bits(zeros):.2f} |")


if __name__ == "__main__":
    main()
