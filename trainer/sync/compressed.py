"""Half the bytes: gradients travel as 16-bit numbers and are summed in them.

fp16 keeps 11 bits and overflows above 65,504; bf16 keeps 8 bits and float32's range.
"""

from typing import Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import UserError
from .base import Sync, sum_over_ranks
from .machines import Machines


class Compressed(Sync):
    dtype: torch.dtype

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        total = sum_over_ranks(buffer.to(self.dtype))
        return total.then(lambda done: buffer.copy_(done.value()))


class FP16(Compressed):
    dtype = torch.float16


class BF16(Compressed):
    dtype = torch.bfloat16

    def setup(self, model: DistributedDataParallel, machines: Optional[Machines] = None) -> None:
        """Raises UserError where the backend cannot sum bf16, as Gloo of torch 1.12."""
        try:
            dist.all_reduce(torch.zeros(1, dtype=self.dtype, device=model.device))
        except RuntimeError as error:
            raise UserError(
                f"--sync bf16: {dist.get_backend()} of torch {torch.__version__} cannot sum bf16: "
                "use --sync fp16, or a newer torch."
            ) from error
        super().setup(model, machines)
