#!/usr/bin/python
"""Finds out as whom a folder is to be shared. Reads only. Python >= 3.6, standard library."""

import os
import pwd

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.users import acting_as, as_far_as_root, name_of

DOCUMENTATION = r"""
---
module: share_reader
short_description: Finds out as whom a folder is to be shared
description:
  - >-
    That is whoever owns the first part of its path that is not root's alone, and so decides what
    the path leads to; where all of it is root's, the user that trains. It is never root.
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

EXAMPLES = r"""
- name: Look at the folder
  share_reader:
    path: /srv/tandem/data
    user: anna
"""

RETURN = r"""
reader:
  description: >-
    uid, gid, and name, which is empty where the machine has none for the number; refusal, why that
    user cannot read the folder, else empty.
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
    folder, _ = as_far_as_root(path)
    entry = os.stat(folder)
    uid, gid = entry.st_uid or trains.pw_uid, entry.st_gid
    name = name_of(uid)
    if not entry.st_uid or not gid:  # neither as user nor as group root
        gid = pwd.getpwnam(name).pw_gid if name else 65534
    refusal = ""
    with acting_as(uid, gid, name):
        try:
            os.listdir(path)
        except OSError as error:
            refusal = error.strerror
    reader = {"uid": uid, "gid": gid, "name": name or "", "refusal": refusal}
    module.exit_json(changed=False, exists=os.path.exists(path), reader=reader)


if __name__ == "__main__":
    main()
