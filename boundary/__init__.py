"""What comes from elsewhere to the control machine, each thing as a struct of known types: whatever
else came is refused where it comes in, and nothing behind it has to look again. Read first schema,
then frames (a guard's), answers (of launcher/node/), run_files, facts (Ansible's modules).
"""
