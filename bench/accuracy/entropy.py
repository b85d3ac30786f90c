"""How many of the codes of `ef` are zero in a run on glyphs, and what lossless packing could save.

    python bench/accuracy/entropy.py [ef:3:peak]

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


def bits(shares: list[float]) -> float:
    """Of a level: how often it is 0, 1 or -1, 2 or -2, and so on, both signs alike."""
    each = [(share / (1 if size == 0 else 2), share) for size, share in enumerate(shares)]
    return -sum(share * math.log2(signed) for signed, share in each if signed)


def count(shares_of: dict[str, list[list[float]]]) -> None:
    """From here on, each coding notes in `shares_of` those of its levels without their signs."""
    real_levels, real_sum = Codec._levels, ErrorFeedback._sum
    kind = threading.local()

    def levels(self: Codec, scaled: torch.Tensor, step: torch.Tensor, own: bool) -> torch.Tensor:
        made = real_levels(self, scaled, step, own)
        used = made[step.view(-1) > 0]  # what fills up a part is all zeros
        counts = torch.bincount(used.abs().view(-1).long(), minlength=self.levels + 1)
        shares_of[getattr(kind, "of", "gradients")].append((counts / used.numel()).tolist())
        return made

    def summed(self: ErrorFeedback, *given: Any) -> torch.Tensor:
        kind.of = "sums"
        made = real_sum(self, *given)
        kind.of = "gradients"
        return made

    Codec._levels, ErrorFeedback._sum = levels, summed  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    case = study.Case(*sys.argv[1:2] or [study.CODED], seed=1)
    shares_of: dict[str, list[list[float]]] = {"gradients": [], "sums": []}
    count(shares_of)
    study.carry_out(case, study.images(study.GLYPHS, 1))
    print("| after steps | codes of | 0, 1, 2, ... | bits a value |\n|---|---|---|---|")
    for kind, shares in shares_of.items():
        for part in SHOWN:
            end = round(part * len(shares))
            last = shares[max(0, end - len(shares) // 20) : end]
            mean = [sum(level) / len(last) for level in zip(*last)]
            levels = ", ".join(f"{share:.3f}" for share in mean)
            print(f"| {part * 1000:.0f} | {kind} | {levels} | {bits(mean):.2f} |")


if __name__ == "__main__":
    main()
