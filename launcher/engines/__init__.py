"""The ways to reach machines, one module each: launcher/machines/engine.py says what they offer."""
