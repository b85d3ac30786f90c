"""Runs on a node: the guard and its recorders. Standard library only, Python >= 3.6."""
