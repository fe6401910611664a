"""What every test shares: compile and autotune caches of its own.

They are identity fields, so a test that fills the home folder's would void the restart of another that runs beside it.
"""

import os
import tempfile

import pytest

from harness.fingerprint.kernel_caches import CACHES

FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    folder = config.stash[FOLDER] = tempfile.TemporaryDirectory(prefix="samebits-caches-")
    for cache in CACHES:
        os.environ[cache.variable] = os.path.join(folder.name, cache.field)  # noqa: PTH118


def pytest_unconfigure(config):
    config.stash[FOLDER].cleanup()
