"""Starts, watches and ends runs from the control machine."""
