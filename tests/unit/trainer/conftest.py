"""What the tests of the trainer share."""

import pytest

from tests.trainer_ranks import make_images


@pytest.fixture(scope="module")
def images(request, tmp_path_factory):
    """A data set of four classes, each with as many images to train on as the module says."""
    count = getattr(request.module, "PER_CLASS", 5)
    return make_images(tmp_path_factory.mktemp("images"), per_class=count)
