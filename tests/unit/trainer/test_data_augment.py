"""TrivialAugment's operations are those of torchvision."""

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode, autoaugment

from trainer.data.augment import TRIVIAL

# In our order; those whose signs mean the other direction by -1 (a magnitude's sign is drawn).
NAMES = {
    **{"Identity": 1, "ShearX": 1, "ShearY": 1, "TranslateX": -1, "TranslateY": -1, "Rotate": 1},
    **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 1),
    **dict.fromkeys(("Posterize", "Solarize", "AutoContrast", "Equalize"), 1),
}
SPACE = autoaugment.TrivialAugmentWide()._augmentation_space(31)


@pytest.mark.parametrize(("name", "entry"), list(zip(NAMES, TRIVIAL)), ids=NAMES)
def test_an_operation_at_its_largest_is_that_of_torchvision(name, entry):
    most, signed, operation = entry
    largest = float(SPACE[name][0].flatten()[-1])
    assert signed == SPACE[name][1]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    nearest = InterpolationMode.NEAREST
    theirs = autoaugment._apply_op(image, name, NAMES[name] * largest, nearest, None)
    np.testing.assert_array_equal(np.asarray(operation(image, most)), np.asarray(theirs))
    assert len(SPACE) == len(TRIVIAL)
