"""Settings: explicit, typed, checked, later layers winning."""

import pytest

from harness.engine import Setting
from harness.errors import UsageError
from harness.settings import mode_settings, parse_assignments, resolve


class Adapter:
    name = "toy"

    def settings(self):
        return (
            Setting(name="threads", default=2, meaning="", minimum=1),
            Setting(name="mode", default="a", meaning="", choices=("a", "b")),
            Setting(name="flag", default=False, meaning=""),
            Setting(name="share", default=0.5, meaning=""),
        )

    def modes(self):
        return {"deterministic": {"mode": "b"}}


def test_every_setting_is_explicit_and_later_layers_win():
    layers = [("one", {"threads": 3, "mode": "b"}), ("two", {"threads": 4})]
    assert resolve(Adapter(), layers) == (("flag", False), ("mode", "b"), ("share", 0.5), ("threads", 4))


def test_assignments_take_the_type_of_the_default():
    texts = ["threads=8", "mode=b", "flag=true", "share=0.25"]
    assert parse_assignments(Adapter(), texts) == {"threads": 8, "mode": "b", "flag": True, "share": 0.25}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads", "expected key=value"),
        ("thread=2", "did you mean 'threads'"),
        ("threads=two", "expected int, got 'two'"),
        ("threads=0", "at least 1, got 0"),
        ("mode=c", "'c' is not offered"),
        ("flag=yes", "expected true or false"),
        ("share=nan", "expected a finite number"),
        ("share=inf", "expected a finite number"),
    ],
)
def test_a_bad_assignment_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_assignments(Adapter(), [text])


def test_a_layer_of_the_wrong_type_names_its_place():
    with pytest.raises(UsageError, match=r"cell 'x': \[axis\]: threads: expected int, got True \(bool\)"):
        resolve(Adapter(), [("cell 'x': [axis]", {"threads": True})])


def test_an_unknown_mode_is_refused():
    assert mode_settings(Adapter(), "deterministic", "--mode") == {"mode": "b"}
    with pytest.raises(UsageError, match="has no mode 'determinstic'; did you mean 'deterministic'"):
        mode_settings(Adapter(), "determinstic", "--mode")
