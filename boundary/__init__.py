"""Everything that other machines and files send to the control node, as structs of known types.

Anything else is rejected here, so that no code behind the boundary has to check again. Read first
schema, then frames (of a guard), answers (of launcher/node/), run_files, and facts (of Ansible).
"""
