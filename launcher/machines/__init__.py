"""The machines: their list, what is asked of the way to each, and whose they are."""
