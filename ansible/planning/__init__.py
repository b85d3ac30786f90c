"""What site.yml would do on which machine: pure functions of facts and settings.

No file here reads a machine, changes one, or imports Ansible. Roles call these functions through
ansible/filter_plugins/tandem.py, `make dry-provision` and the tests call them directly.
"""

import sys
from pathlib import Path

# contract/ is at the root, where neither Ansible nor a program of ansible/ looks for modules. At
# the end of the list, where it hides nobody's module.
sys.path.append(str(Path(__file__).resolve().parents[2]))
