"""The ways to reach machines, one module each: launcher/engine.py says what they offer."""
