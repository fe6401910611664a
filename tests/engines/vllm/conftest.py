"""What the tests of vLLM share: they fail where it must be installed, and say UNSUPPORTED where it need not be."""

import pytest
from presence import missing

from engines.vllm_local import NOT_INSTALLED
from harness.packages import is_installed


@pytest.fixture(scope="session")
def vllm():
    """Present, or the test fails (CI) or is UNSUPPORTED with the reason (a developer's machine)."""
    if is_installed("vllm"):
        return
    missing("vllm", NOT_INSTALLED)
