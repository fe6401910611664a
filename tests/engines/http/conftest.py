"""What the tests of endpoints need to be told of pytest."""


def pytest_configure(config):
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker of pytest-xdist runs")
