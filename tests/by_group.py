"""Which tests share a process of xdist: those of a file, and those of files that share a thing.

(xdist's own groups, --dist=loadgroup, are lost with pytest 9.2: its ids cannot be changed.)
"""

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling


class ByGroup(LoadScopeScheduling):
    """Hands whole groups of files to the processes, in order. `groups`: {file: what it shares}."""

    def __init__(self, config, log, groups):
        super().__init__(config, log)
        self._groups = groups

    def _split_scope(self, nodeid):
        name = Path(nodeid.partition("::")[0]).name
        return self._groups.get(name, name)
