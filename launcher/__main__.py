"""`python -m launcher`: the verbs."""

from __future__ import annotations

import sys

from contract import interrupts
from launcher.cli import main

interrupts.heard()
sys.exit(main(sys.argv[1:]))
