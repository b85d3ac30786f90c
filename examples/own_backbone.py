"""A backbone of your own: a ResNet-18 for small images that keeps their resolution at first.

    python -m trainer --data data/digits --model examples.own_backbone:small_resnet18 --epochs 4

It returns features (n, 512, h, w); the trainer adds average pooling and a linear classifier. A
function that takes `num_classes` and returns (n, num_classes) is used as it is.
"""

from torch import nn
from torchvision.models import resnet18


def small_resnet18() -> nn.Module:
    """Features of images of at most 64 pixels: a stride of 8 instead of 32."""
    resnet = resnet18(weights=None)
    resnet.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    resnet.maxpool = nn.Identity()
    # All children but the last two, torchvision's pooling and classifier.
    return nn.Sequential(*list(resnet.children())[:-2])
