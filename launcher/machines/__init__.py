"""The machines: their list, the ways to them, and what they say of themselves."""
