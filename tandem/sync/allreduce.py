"""Average gradients with torch's hooks for DDP, in the gradients' precision or in 16 bits.

16 bits halve the bytes. fp16 has 11 significant bits and overflows above 65,504; bf16 has 8, and
the range of float32.
"""

from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_group

from contract.errors import UserError

from .base import Future, Sync, Topology


class AllReduce(Sync):
    """Sums exactly, as DDP does without a hook."""

    torch_hook = staticmethod(default_hooks.allreduce_hook)

    def hook(self, bucket: dist.GradBucket) -> Future:
        return self.torch_hook(_get_default_group(), bucket)


class FP16(AllReduce):
    torch_hook = staticmethod(default_hooks.fp16_compress_hook)


class BF16(AllReduce):
    torch_hook = staticmethod(default_hooks.bf16_compress_hook)

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        """Prepare, and raise UserError if the backend cannot sum bf16."""
        super().setup(device, topology)
        # Gloo of torch 1.12 cannot. A trial shows it before the first step does.
        try:
            dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16, device=device))
        except RuntimeError as error:
            raise UserError(
                f"--sync {self.strategy.spec}: the backend {dist.get_backend()} of torch "
                f"{torch.__version__} cannot sum bf16: choose fp16, or use a newer torch."
            ) from error
