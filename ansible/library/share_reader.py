#!/usr/bin/python
"""Find the user as whom a folder is shared: clients can read what this user can read.

Ansible runs this file on the server of a share, so it has to run on Python 3.6 without other
packages. It only reads.
"""

import os
import pwd

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.users import acting_as, name_of, split_at_root

DOCUMENTATION = r"""
---
module: share_reader
short_description: Finds the user as whom a folder is shared
description:
  - >-
    The user who owns the first folder of the path that others than root may change, since this
    user decides where the path leads. If only root may change all folders, the user that trains.
    Never root.
  - Changes nothing.
options:
  path:
    description: The folder.
    type: str
    required: true
  user:
    description: The user that trains.
    type: str
    required: true
author: Tandem
"""

RETURN = r"""
reader:
  description: >-
    uid, gid, and name, which is empty if the machine has none for the number; refusal, why that
    user cannot read the folder, or empty.
  returned: always
  type: dict
exists:
  description: Whether the path exists.
  returned: always
  type: bool
"""


def main():
    module = AnsibleModule(
        {"path": {"required": True}, "user": {"required": True}}, supports_check_mode=True
    )
    path, trains = module.params["path"], pwd.getpwnam(module.params["user"])
    # The owner of the first folder that others than root may change decides where the path leads.
    folder, _ = split_at_root(path)
    entry = os.stat(folder)
    uid, gid = entry.st_uid or trains.pw_uid, entry.st_gid
    name = name_of(uid)
    # Clients could read files of root's group too. 65534 is nogroup.
    if not entry.st_uid or not gid:
        gid = pwd.getpwnam(name).pw_gid if name else 65534
    refusal = ""
    # ACLs and links also decide who may read, so only an attempt shows it.
    with acting_as(uid, gid, name):
        try:
            os.listdir(path)
        except OSError as error:
            refusal = error.strerror
    reader = {"uid": uid, "gid": gid, "name": name or "", "refusal": refusal}
    module.exit_json(changed=False, exists=os.path.exists(path), reader=reader)


if __name__ == "__main__":
    main()
