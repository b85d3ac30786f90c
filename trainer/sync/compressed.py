"""Half the bytes: gradients travel as 16-bit numbers and are summed in them.

fp16 keeps 11 bits and overflows above 65,504; bf16 keeps 8 bits and float32's range. Gloo sums
both.
"""

import torch

from .base import Sync, sum_over_ranks


class Compressed(Sync):
    dtype: torch.dtype

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        total = sum_over_ranks(buffer.to(self.dtype))
        return total.then(lambda done: buffer.copy_(done.value()))


class FP16(Compressed):
    dtype = torch.float16


class BF16(Compressed):
    dtype = torch.bfloat16
