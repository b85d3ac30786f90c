"""Run a whole cluster inside one machine: systemd machines on a private network.

Read plan.py (names and addresses), life.py (up and down), node.py (the power of one machine).
"""
