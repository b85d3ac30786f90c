"""Reject invalid lists of machines in all of Ansible's programs.

Without hosts in group cluster, plays would succeed and do nothing. A machine's name becomes a part
of file names, so it must not be a path. ansible.cfg enables this plugin, which Ansible calls for
each group and machine before any task; it gives them no variables.
"""

import sys
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.inventory.group import Group
from ansible.plugins.vars import BaseVarsPlugin

from ansible import context

# Ansible loads this file by its path, as it loads filter_plugins/tandem.py.
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
    """Check each group and each machine of the inventory."""

    def get_vars(self, loader, path, entities):
        sources = context.CLIARGS.get("inventory") or ()
        # `-i localhost,` is a typed list, which has no groups.
        typed = all("," in source for source in sources)
        for entity in entities:
            fault = ""
            if not isinstance(entity, Group):
                fault = machines.name_fault(entity.name)
            elif entity.name == "all" and not typed:  # all groups are descendants of `all`
                groups = [
                    group for group in entity.get_descendants() if group.name == machines.GROUP
                ]
                if not any(group.get_hosts() for group in groups):
                    fault = machines.NOBODY
            if fault:
                raise AnsibleError(f"the inventory {' '.join(sources)} {fault}")
        return {}
