"""What every test shares: compile and autotune caches of its own, and the worker of what it shares with others.

Caches are identity fields, so a test that fills the home folder's would void the restart of another that runs beside
it. Tests that share a fixture of their module run in one worker: else each worker makes it, and some take minutes.
"""

import os
import tempfile

import pytest

from harness.fingerprint.kernel_caches import CACHES

FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker of pytest-xdist runs")
    folder = config.stash[FOLDER] = tempfile.TemporaryDirectory(prefix="samebits-caches-")
    for cache in CACHES:
        os.environ[cache.variable] = os.path.join(folder.name, cache.field)  # noqa: PTH118


def pytest_unconfigure(config):
    config.stash[FOLDER].cleanup()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    for item in items:
        fixtures = [found for definitions in item._fixtureinfo.name2fixturedefs.values() for found in definitions]
        shares = any(found.scope == "module" and found.baseid for found in fixtures)
        if shares and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
