"""What the README tells people to type exists, and its cell is a cell."""

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from harness.cell import parse_cell
from harness.cli import commands

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = sorted(set(re.findall(r"`(samebits [a-z][^`]*)`", README)))


def test_there_is_something_to_check():
    assert len(TYPED) >= 6


@pytest.mark.parametrize("text", TYPED)
def test_a_command_of_the_readme_parses(text):
    words = shlex.split(text)[1:]
    command: click.Command = commands
    context = click.Context(commands)
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
        context = click.Context(command, parent=context)
    assert command is not commands, f"no such command: {text}"
    if isinstance(command, click.Group):
        assert words == [], f"no such subcommand: {text}"
        return
    command.parse_args(context, words)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z]+)", README))))
def test_a_make_target_of_the_readme_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_cell_of_the_readme_is_valid_and_short():
    text = re.search(r"```toml\n(.*?)```", README, flags=re.DOTALL)[1]
    table = tomllib.loads(text)
    del table["schema"]
    cell, mistakes = parse_cell(table)
    assert mistakes == ()
    assert cell.name == "max-num-seqs"
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) <= 12


def test_the_tree_of_the_readme_is_the_tree():
    text = re.search(r"## The tree\n\n```text\n(.*?)```", README, flags=re.DOTALL)[1]
    for line in text.splitlines():
        assert (ROOT / line.split()[0]).exists(), line


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists() or target.startswith("http"), target
