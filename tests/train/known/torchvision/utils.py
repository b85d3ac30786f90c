"""In the style of utils.py beside torchvision's references."""

import builtins
import os

import torch
from torch import distributed


def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not args.distributed:
        return
    args.rank, args.gpu = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    if args.device == "cuda":
        torch.cuda.set_device(args.gpu)
    backend = "nccl" if args.device == "cuda" else "gloo"
    print(f"| distributed init (rank {args.rank}): {args.dist_url}", flush=True)
    distributed.init_process_group(
        backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    distributed.barrier()
    silence_other_ranks(args.rank == 0)


def silence_other_ranks(is_master):
    builtin_print = builtins.print

    def print_on_master(*words, force=False, **keywords):
        if is_master or force:
            builtin_print(*words, **keywords)

    builtins.print = print_on_master


def save_on_master(*words):
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        torch.save(*words)
