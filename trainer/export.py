"""python -m trainer.export OUTPUT_FOLDER FILE: the plain weights of a run's latest state."""

import argparse
import pathlib
import sys
from typing import Any, Dict, List, Optional

import torch

from contract.errors import UserError

from .checkpoint import complete
from .finite import not_finite
from .snapshots import Snapshot, snapshot_in
from .writer import atomic_write, checkpoints


def newest(folder: pathlib.Path, best: bool) -> Snapshot:
    """The state with the most samples of the newest run, or the best one. Raises UserError."""
    paths = sorted(folder.glob("checkpoints/*/best.pt")) if best else checkpoints(folder)
    states = [snapshot_in(str(path), state) for path, _, state in complete(paths)]
    if not states:
        raise UserError(
            f"{folder}: no complete {'best' if best else 'step-*'}.pt in checkpoints/*/."
        )
    return max(states, key=lambda state: (state["run"], state["samples"]))


def weights(state: Snapshot, average: bool) -> Dict[str, torch.Tensor]:
    """The model's state dict, or its moving average's; without DDP's prefix, in fp32 at least."""
    ema = state["ema"]
    if average and ema is None:
        raise UserError("--ema: this run kept no average, which it does if trained with --ema.")
    chosen = ema["average"] if average and ema is not None else state["model"]
    if not_finite(chosen, chosen):
        raise UserError("the state is not finite: the run diverged. Export an earlier one.")
    half = (torch.float16, torch.bfloat16)
    whole: Dict[Any, torch.Tensor] = {}  # a tensor of several names, such as a shared layer's, once
    for value in chosen.values():
        if _place(value) not in whole:
            whole[_place(value)] = value.float() if value.dtype in half else value
    return {key: whole[_place(value)] for key, value in chosen.items()}


def _place(value: torch.Tensor) -> Any:
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def write(tensors: Dict[str, torch.Tensor], path: pathlib.Path) -> None:
    """Write a torch or a safetensors file, depending on the suffix. Raises UserError."""
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no such folder to write to.")
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise UserError(f"{path}: needs `pip install safetensors`; or name it .pt.") from error
        plain = {key: value.contiguous() for key, value in tensors.items()}
        with atomic_write(path) as file:
            save_file(plain, file.name)
    elif path.suffix == ".pt":
        with atomic_write(path) as file:
            torch.save(tensors, file)
    else:
        raise UserError(f"{path}: the name must end in .pt or .safetensors.")


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a run's output folder")
    parser.add_argument("file", type=pathlib.Path, help="FILE.pt or FILE.safetensors")
    parser.add_argument("--best", action="store_true", help="the state with the best top-1")
    parser.add_argument("--ema", action="store_true", help="its moving average")
    args = parser.parse_args(argv)
    try:
        tensors = weights(newest(args.folder, args.best), args.ema)
        write(tensors, args.file)
    except UserError as error:
        print(f"trainer.export: {error}", file=sys.stderr)
        return 2
    print(f"{args.file}: {sum(t.numel() for t in tensors.values()):,} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
