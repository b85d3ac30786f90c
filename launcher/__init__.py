"""Starts, watches and ends runs from the control node."""
