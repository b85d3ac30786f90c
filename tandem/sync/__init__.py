"""Average gradients over slow links, as communication hooks of DDP; scripts call `attach`.

Read in this order:
- `base.py`: the interface of a strategy, and the ranks of one machine
- `allreduce.py`: exact sums and sums in 16 bits
- `feedback.py`: `ef`, with `codec.py`, `entropy.py`, and `carrier.py`, which sends in threads
- `attach.py`: the interface for scripts, with `usage.py` and `unsummed.py`, which watch how a
  script uses the sums
"""

from .attach import Attached, attach, hook
from .base import Sync, Topology
from .kinds import KINDS, effective_spec, make

__all__ = ["KINDS", "Attached", "Sync", "Topology", "attach", "effective_spec", "hook", "make"]
