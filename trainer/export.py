"""`make export RUN=...`, or python -m trainer.export RUN=FOLDER: write the plain weights of a run's
best model, or of its backbone."""

import pathlib
import sys
from typing import Dict, List, Optional

import torch

from contract.command_line import verb_words
from contract.errors import UserError
from contract.runs import RUNS
from contract.text import pluralize

from .checkpoint import read_complete
from .finite import memory_key, not_finite
from .snapshots import Snapshot, snapshot_in
from .writer import atomic_write, checkpoints

BACKBONE_PREFIX = "backbone."  # of the tensors of a user's backbone within models.WithHead


def read_best(run: str) -> Snapshot:
    """Read the best state of the newest run in a folder, or the one with the most samples if none
    was evaluated. `run`: an output folder, the name of a run, or a checkpoint. Raises UserError."""
    path = next((p for p in (pathlib.Path(run), pathlib.Path(RUNS, run)) if p.exists()), None)
    if path is None:
        raise UserError(f"RUN={run}: there is no such run or folder: `make runs` lists the runs.")
    best_files = [path] if path.is_file() else sorted(path.glob("checkpoints/*/best.pt"))
    for files in (best_files, checkpoints(path)):
        states = [snapshot_in(str(file), state) for file, state in read_complete(files)]
        if states:
            return max(states, key=lambda state: (state["run"], state["samples"]))
    if (path / "work").is_dir():  # only a run of a user's script has this folder
        raise UserError(
            f"{path} is a run of your own script, and make export knows only the models of "
            f"Tandem's trainer: the files that the script wrote are in {path / 'work'}."
        )
    raise UserError(f"{path}: no complete best.pt or step-*.pt in checkpoints/*/.")


def model_weights(state: Snapshot) -> Dict[str, torch.Tensor]:
    """Return the state dict of the model, or of its moving average if there is one, in fp32 at
    least. Raises UserError if a tensor is not finite."""
    # The run evaluated the average, so the reported accuracy is that of the average.
    chosen = state["model"] if state["ema"] is None else state["ema"]["average"]
    if not_finite(chosen, chosen):
        raise UserError("the state is not finite: the run diverged. Export an earlier one.")
    half = (torch.float16, torch.bfloat16)
    converted: Dict[str, torch.Tensor] = {}
    # A tensor with several names, such as a shared layer's, must stay one tensor in the file.
    for value in chosen.values():
        if memory_key(value) not in converted:
            converted[memory_key(value)] = value.float() if value.dtype in half else value
    return {key: converted[memory_key(value)] for key, value in chosen.items()}


def backbone_weights(tensors: Dict[str, torch.Tensor], classes: int) -> Dict[str, torch.Tensor]:
    """Return the tensors without the classifier, which is the last layer with an output for each
    class. Raises UserError if no layer has as many outputs."""
    heads = [key for key, value in tensors.items() if value.ndim > 1 and len(value) == classes]
    if not heads:
        raise UserError(
            f"PART=backbone: no layer of this model has {pluralize(classes, 'output')}, one a "
            "class, so that it is not known which to leave out: export the whole model."
        )
    head = heads[-1].rpartition(".")[0] + "."
    remaining = {key: value for key, value in tensors.items() if not key.startswith(head)}
    has_prefix = all(key.startswith(BACKBONE_PREFIX) for key in remaining)
    prefix_length = len(BACKBONE_PREFIX) if has_prefix else 0
    return {key[prefix_length:]: value for key, value in remaining.items()}


def write_weights(tensors: Dict[str, torch.Tensor], path: pathlib.Path) -> None:
    """Write a torch or a safetensors file, depending on the suffix of `path`. Raises UserError."""
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no such folder to write to.")
    if path.suffix == ".safetensors":
        # The package is in no stack, and only this format needs it.
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise UserError(f"{path}: needs `pip install safetensors`; or name it .pt.") from error
        # `save_file` rejects tensors that are not contiguous.
        plain = {key: value.contiguous() for key, value in tensors.items()}
        with atomic_write(path) as file:
            save_file(plain, file.name)
    elif path.suffix == ".pt":
        with atomic_write(path) as file:
            torch.save(tensors, file)
    else:
        raise UserError(f"{path}: the name must end in .pt or .safetensors.")


def main(argv: Optional[List[str]] = None) -> int:
    try:
        words = verb_words("export", sys.argv[1:] if argv is None else argv, "make export")
        part_name = words.get("part", "model")
        file = pathlib.Path(words.get("to", f"{part_name}.pt"))
        state = read_best(words.get("run", "latest"))
        tensors = model_weights(state)
        if part_name == "backbone":
            tensors = backbone_weights(tensors, len(state["classes"]))
        write_weights(tensors, file)
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{file.resolve()}: the {part_name}'s weights, {count:,} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
