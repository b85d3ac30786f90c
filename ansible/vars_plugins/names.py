"""Reject invalid lists of machines in all of Ansible's programs.

A list without hosts in group cluster would make plays succeed without doing anything. A machine's
name must not be a path, since names of files contain it.
"""

import sys
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.inventory.group import Group
from ansible.plugins.vars import BaseVarsPlugin

from ansible import context

# As in filter_plugins/tandem.py: Ansible loads this file by its path.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from contract import machines

DOCUMENTATION = """
    name: names
    short_description: refuses a list of machines that is of no use
    options:
      stage:
        description: Whether it is asked as a list is read, or for each task.
        choices: [all, task, inventory]
        default: all
        type: str
"""


class VarsModule(BaseVarsPlugin):
    """Check each group and each machine. It has no variables: Ansible asks vars plugins about all
    of them before any task."""

    def get_vars(self, loader, path, entities):
        sources = context.CLIARGS.get("inventory") or ()
        typed = all("," in source for source in sources)  # `-i localhost,` has no groups
        for entity in entities:
            fault = ""
            if not isinstance(entity, Group):
                fault = machines.name_fault(entity.name)
            elif entity.name == "all" and not typed:  # every other group is below it
                groups = [
                    group for group in entity.get_descendants() if group.name == machines.GROUP
                ]
                if not any(group.get_hosts() for group in groups):
                    fault = machines.NOBODY
            if fault:
                raise AnsibleError(f"the inventory {' '.join(sources)} {fault}")
        return {}
