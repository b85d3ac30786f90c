"""The ways to machines, one module each: launcher/engine.py says what they offer."""
