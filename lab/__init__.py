"""A whole cluster inside one machine: systemd machines on a private network."""
