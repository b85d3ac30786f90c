"""Prints what an environment contains as JSON, without importing torch (which takes seconds)."""

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, version


def version_of(package):
    try:
        return version(package).split("+")[0]  # "2.15.0+cu126" -> "2.15.0"
    except PackageNotFoundError:
        return None


apex = importlib.util.find_spec("apex")
print(
    json.dumps(
        {
            "torch": version_of("torch"),
            "torchvision": version_of("torchvision"),
            # NVIDIA's apex has apex/amp; PyPI's, a toolkit for Pyramid, does not.
            "foreign_apex": apex is not None and importlib.util.find_spec("apex.amp") is None,
        }
    )
)
