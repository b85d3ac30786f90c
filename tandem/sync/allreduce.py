"""Means of gradients by torch's own hooks of DDP: in their own precision, or in 16 bits.

Half the bytes: fp16 has 11 significant bits and overflows above 65,504; bf16 has 8 and the range of
float32.
"""

from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_group

from contract.errors import UserError

from .base import Future, Sync, Topology


class AllReduce(Sync):
    torch_hook = staticmethod(default_hooks.allreduce_hook)

    def hook(self, bucket: dist.GradBucket) -> Future:
        return self.torch_hook(_get_default_group(), bucket)


class FP16(AllReduce):
    torch_hook = staticmethod(default_hooks.fp16_compress_hook)


class BF16(AllReduce):
    torch_hook = staticmethod(default_hooks.bf16_compress_hook)

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        """Raises UserError where the backend cannot sum bf16, as with Gloo in torch 1.12."""
        super().setup(device, topology)
        try:
            dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16, device=device))
        except RuntimeError as error:
            raise UserError(
                f"--sync {self.strategy.spec}: {dist.get_backend()} of torch {torch.__version__} "
                "cannot sum bf16: use --sync fp16, or a newer torch."
            ) from error
