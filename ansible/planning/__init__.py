"""Plan what site.yml does on each machine: pure functions of facts and settings.

No file here reads a machine, changes one, or imports Ansible. Roles call these functions through
ansible/filter_plugins/tandem.py, `make dry-provision` and the tests call them directly.
"""


class PlanError(ValueError):
    """Settings that these machines cannot have; the message says why and what is nearest."""
