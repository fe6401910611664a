"""What a test does where a tool it needs is missing: it fails where it must run, and says UNSUPPORTED elsewhere."""

import os

import pytest


def must_run(environ, tool):
    """Whether a missing tool is a failure: in CI, and where SAMEBITS_REQUIRE names it."""
    required = environ.get("SAMEBITS_REQUIRE", "").replace(",", " ").split()
    return tool in required or environ.get("CI", "").lower() not in ("", "0", "false")


def missing(tool, reason, *, module=False):
    """Ends the test, or with `module` the file that is being collected. Never returns."""
    if must_run(os.environ, tool):
        pytest.fail(f"these tests must run here, and cannot: {reason}")
    pytest.skip(f"UNSUPPORTED: {reason}", allow_module_level=module)
