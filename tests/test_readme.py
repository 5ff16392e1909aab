"""The README's code runs, and what it says of names and commands is true."""

import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import fsdp_jax
from tests.flags import xla_flags

README = pathlib.Path(__file__).parent.parent / "README.md"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


RUN_ALL = """
import contextlib, io, json, sys, traceback
for block in json.load(sys.stdin):
    out, error = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            exec(block, {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([out.getvalue(), error]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[list[str]]:
    """What each block printed, and how it failed; all in one process."""
    loop, *others = code_blocks("python")
    # A block without imports goes on from the loop.
    blocks = [loop, *(b if "import" in b else loop + b for b in others)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        env=os.environ | {"XLA_FLAGS": xla_flags(8)},
        cwd=tmp_path_factory.mktemp("readme"),
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(code_blocks("python"))))
def test_a_code_block_runs(number, outcomes):
    printed, error = outcomes[number]
    assert not error
    assert re.search(r"parameters over \d devices", printed)


def test_there_are_two_commands_and_both_name_files_that_exist():
    commands = code_blocks("sh")
    assert len(commands) == 2
    assert "examples/train_gpt.py" in commands[0] and "pytest" in commands[1]
    assert (README.parent / "examples" / "train_gpt.py").exists()


def test_every_public_name_is_mentioned():
    text = README.read_text()
    names = [n for n in dir(fsdp_jax) if not n.startswith("_")]
    modules = [n for n in names if isinstance(getattr(fsdp_jax, n), types.ModuleType)]
    public = [n for n in names if n not in modules]
    unmentioned = [n for n in public if not re.search(rf"\b{n}\b", text)]
    assert unmentioned == []


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
