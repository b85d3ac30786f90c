"""Prints Python, prefix and torch of this environment as JSON, without importing torch (slow)."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    torch = version("torch")
except PackageNotFoundError:
    torch = None
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "prefix": sys.prefix, "torch": torch}))
