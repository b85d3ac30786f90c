"""The third task's model: a small ConvNeXt of torchvision's classes, for images of 32 pixels."""

from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

# Channels of each stage and of the next one, and blocks.
STAGES = ((32, 64, 2), (64, 128, 2), (128, None, 2))


def small_convnext(num_classes: int) -> nn.Module:
    """Outputs for so many classes; 0.42 million parameters."""
    return ConvNeXt([CNBlockConfig(*stage) for stage in STAGES], num_classes=num_classes)
