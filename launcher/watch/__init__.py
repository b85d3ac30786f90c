"""Watches an attempt: its guards, the output of its ranks, its end and the next steps."""
