"""What the tests of vLLM share: they fail where it must be installed, and say UNSUPPORTED where it need not be."""

import importlib.util

import pytest
from presence import missing

from engines.vllm_local import NOT_INSTALLED


@pytest.fixture(scope="session")
def vllm():
    """Present, or the test fails (CI) or is UNSUPPORTED with the reason (a developer's machine)."""
    if importlib.util.find_spec("vllm") is not None:
        return
    missing("vllm", NOT_INSTALLED)
