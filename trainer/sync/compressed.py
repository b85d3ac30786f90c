"""Half the bytes: gradients travel as 16-bit numbers and are summed in that type.

fp16 has 11 significant bits and overflows above 65,504; bf16 has 8 and the range of float32.
"""

from typing import Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contract.errors import UserError

from .allreduce import AllReduce
from .machines import Machines


class Compressed(AllReduce):
    dtype: torch.dtype

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        total = super().start_sum(buffer.to(self.dtype), index)
        return total.then(lambda done: buffer.copy_(done.value()))


class FP16(Compressed):
    dtype = torch.float16


class BF16(Compressed):
    dtype = torch.bfloat16

    def setup(self, model: DistributedDataParallel, machines: Optional[Machines] = None) -> None:
        """Raises UserError where the backend cannot sum bf16, as with Gloo in torch 1.12."""
        super().setup(model, machines)
        try:
            self.start_sum(torch.zeros(1, device=model.device), 0).wait()
        except RuntimeError as error:
            backend = "gloo" if self.strategy.by_gloo else dist.get_backend()
            raise UserError(
                f"--sync {self.strategy.spec}: {backend} of torch {torch.__version__} cannot sum "
                "bf16: use --sync fp16, or a newer torch."
            ) from error
