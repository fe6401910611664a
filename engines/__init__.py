"""Engines the harness can drive: one thin adapter per engine, and the bundled inference engine itself."""
