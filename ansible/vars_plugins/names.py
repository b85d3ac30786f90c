"""Refuses a list of machines in which one is called by a path, whichever program of Ansible's reads
it: plays name files by their machines, on this machine and on others.
"""

import sys
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.inventory.host import Host
from ansible.plugins.vars import BaseVarsPlugin

# As in filter_plugins/tandem.py: Ansible loads this file by its path.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from contract import names


class VarsModule(BaseVarsPlugin):
    """Has no variables: vars plugins are what Ansible asks about each machine before any task."""

    def get_vars(self, loader, path, entities):
        for entity in entities:
            wrong = isinstance(entity, Host) and names.fault(entity.name)
            if wrong:
                raise AnsibleError(f"the inventory {wrong}")
        return {}
