"""All differences between torch 1.12.1/Python 3.9 and the newest, in one place."""

import sys

# Python 3.9 has no keyword-only dataclasses; options are always given by keyword there too.
KW_ONLY = {"kw_only": True} if sys.version_info >= (3, 10) else {}
