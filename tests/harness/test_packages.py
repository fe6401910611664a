"""What counts as an installed package."""

import sys

from harness.packages import is_installed


def test_a_folder_of_a_packages_name_on_the_path_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "onlyafolder").mkdir()
    (tmp_path / "apackage").mkdir()
    (tmp_path / "apackage" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert not is_installed("onlyafolder")
    assert not is_installed("nowhereatall")
    assert is_installed("apackage")
    assert is_installed("numpy")
