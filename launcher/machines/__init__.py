"""Reads the list of machines with their routes and owners, and connects to them."""
