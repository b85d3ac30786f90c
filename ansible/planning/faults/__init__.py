"""What can be wrong with a machine, one file per subject.

Each check is a pure function (facts, question) that yields (fault, cause, remedy); what facts and
question contain is said in ansible/planning/preflight.py.
"""
