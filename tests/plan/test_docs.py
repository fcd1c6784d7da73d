"""Every command on the page about your model and data is a plan, on the model and the chats that the page makes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lorabench import recommend
from lorabench.plan.compose import load_config, plan

PAGE = (Path(__file__).resolve().parents[2] / "docs/your-model-and-data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (code,) = blocks("python")
    made = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        exec(compile(code, "the page", "exec"), {})
    return made


def planned(subcommand, arguments):
    if subcommand == "recommend":
        return recommend.planned(recommend.composed(arguments), "cpu")
    assert subcommand == "sweep"
    return plan(load_config(arguments), "cpu").cells


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_a_plan(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, subcommand, *arguments = shlex.split(command)
    assert program == "lorabench" and planned(subcommand, arguments)


def test_the_page_begins_with_what_to_switch_on():
    assert COMMANDS[0].startswith("lorabench recommend ") and "chats.jsonl" in COMMANDS[0]
