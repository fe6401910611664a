"""Loads the samebits pytest plugin, and nothing else."""

pytest_plugins = ["harness.plugin"]
