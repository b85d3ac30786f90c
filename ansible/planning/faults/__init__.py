"""Checks of a machine, one file per subject.

Each is a pure function (facts, question) that yields (fault, cause, remedy);
ansible/planning/preflight.py describes facts and question.
"""
