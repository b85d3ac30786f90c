"""What can be wrong with a machine, one file a subject.

Each check is a pure function (facts, question) that yields (fault, cause, remedy); what facts and
question hold is told in ansible/planning/preflight.py.
"""
