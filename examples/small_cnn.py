"""A model of your own, small enough for two old cores: three convolutions with batch norm.

    python -m trainer --data data/digits --model examples.small_cnn:small_cnn --epochs 8

It is what `make demo` trains, and `make train` where neither MODEL nor DATA is given. It returns
features (n, 128, h, w); the trainer adds average pooling and a linear classifier. A function that
takes `num_classes` and returns (n, num_classes) is used as it is.
"""

from torch import nn

CHANNELS = (32, 64, 128)


def small_cnn() -> nn.Module:
    """Features of images of at least 8 pixels: each convolution halves height and width."""
    layers, before = [], 3
    for channels in CHANNELS:
        # Without a bias, since batch normalisation has one.
        layers.append(nn.Conv2d(before, channels, 3, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*layers)
