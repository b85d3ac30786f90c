"""Refuses a list of machines with which plays do nothing and are content, since group cluster has
nobody, and one in which a machine is called by a path, since plays name files by their machines:
whichever program of Ansible's reads it.
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
    """Has no variables: vars plugins are what Ansible asks about each group and each machine before
    any task."""

    def get_vars(self, loader, path, entities):
        sources = context.CLIARGS.get("inventory") or ()
        typed = all("," in source for source in sources)  # `-i localhost,` has no groups
        for entity in entities:
            of_group = isinstance(entity, Group)
            fault = group_fault(entity, typed) if of_group else machines.name_fault(entity.name)
            if fault:
                raise AnsibleError(f"the inventory {' '.join(sources)} {fault}")
        return {}


def group_fault(group, typed):
    """Why a list whose groups begin with this one is of no use, as the end of a sentence; "" where
    it is of use, or the group is not the first."""
    if group.name != "all" or typed:
        return ""
    clusters = [child for child in group.get_descendants() if child.name == machines.GROUP]
    return "" if any(child.get_hosts() for child in clusters) else machines.NOBODY
