"""A few bits per value in each step; nothing is lost, since errors are added to the next step."""

from typing import Any, List

import torch

from .carrier import Stage
from .codec import CODECS
from .feedback import Feedback
from .parts import Bucket, Parts


class ErrorFeedback(Feedback):
    @property
    def parts(self) -> Parts:
        return Parts(CODECS[self.strategy.arguments[0]], self.machines.leaders)

    def stages(self) -> List[Stage]:
        return self.parts.stages()

    def blank(self, job: Any) -> Bucket:
        return self.parts.blank(job)

    def wire(self, bucket: Bucket) -> List[torch.Tensor]:
        return self.parts.wire(bucket)

    def sizes(self, buffer: torch.Tensor, index: int) -> List[int]:
        return self.parts.sizes(buffer.numel())
