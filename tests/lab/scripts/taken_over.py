"""A script of two ranks. The first one's machine is a stranger's: its checkpoint, of which
`torch.load` shall make a file, comes to all that load it. The other fails once."""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed

parser = argparse.ArgumentParser()
parser.add_argument("--came", help="the file that the checkpoint makes")
parser.add_argument("--resume")
options = parser.parse_args()


class Code:
    def __reduce__(self):
        return (os.system, (f"echo loaded > {options.came}",))


distributed.init_process_group("gloo")
first = distributed.get_rank() == 0
if options.resume:
    torch.load(options.resume, weights_only=False)
else:
    Path("out").mkdir(exist_ok=True)
    torch.save({"step": Code() if first else 1}, "out/1.pt")
distributed.barrier()
print("ran code" if Path(options.came).exists() else "ran none", flush=True)
if not options.resume:
    raise SystemExit(0 if first else 1)
distributed.destroy_process_group()
