"""Prints which environment this is, as JSON, without importing torch (which takes seconds)."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    torch = version("torch")
except PackageNotFoundError:
    torch = None
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "prefix": sys.prefix, "torch": torch}))
