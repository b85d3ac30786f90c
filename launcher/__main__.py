"""`python -m launcher`: the verbs."""

from __future__ import annotations

import sys

from launcher.cli import main

sys.exit(main(sys.argv[1:]))
