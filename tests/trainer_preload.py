"""Imported once, by the server from which the ranks of tests/trainer_ranks.py are forked."""

import atexit
import gc

import pytest  # noqa: F401  # of the files whose functions the ranks call
import torchvision.models  # noqa: F401
from PIL import Image

import trainer.__main__
import trainer.process  # noqa: F401
from tests import trainer_models  # noqa: F401

Image.init()  # its formats, which it else imports at a rank's first image
gc.freeze()  # else each rank's collector would look at all these modules, and copy their pages
atexit.register(gc.unfreeze)  # else a library of C++ takes them for leaks at the server's end
