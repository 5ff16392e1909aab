"""The examples run as a user runs them, at small size, and print what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "steps": 3,
    "width": 32,
    "depth": 2,
    "context": 16,
    "batch": 4,
    "sample": 8,
    "devices": 4,
}


def run(name: str, folder: Path, *flags: str, limit_s: float) -> str:
    """Standard output of an example, started in another folder; it must succeed."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_quickstart_prints_shard_shapes_and_checks_out(tmp_path):
    text = run("quickstart.py", tmp_path, limit_s=150)
    lines = text.splitlines()
    assert lines[0] == "SequentialFSDPModule"
    assert lines[1] == "(2, 4)"
    assert "fully_shard has already been applied" in text
    for rank in range(2):
        for what in ("shards", "gradients"):
            assert f"{rank} {what} {{'bias': (4,), 'kernel': (4, 8)}}" in lines
        assert f"{rank} unsharded {{'bias': (8,), 'kernel': (8, 8)}}" in lines
        assert f"{rank} equal to the unsharded run, slice by slice" in lines


@pytest.mark.slow
def test_train_gpt_trains_and_samples(tmp_path):
    flags = [
        part for name, value in SMALL.items() for part in (f"--{name}", f"{value}")
    ]
    text = run("train_gpt.py", tmp_path, *flags, "--describe", limit_s=150)
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\S+)$", text, re.M)]
    assert len(losses) == 3
    assert "blocks.1.up.kernel" in text  # the table of --describe
    assert "on each of 4 cpu devices" in text
    last = text.splitlines()[-1]
    found = re.fullmatch(r"held-out loss: (\S+) -> (\S+) nats per byte", last)
    assert found, last
    before, after = map(float, found.groups())
    assert after < before


@pytest.mark.slow
def test_train_gpt_help_explains_every_flag(tmp_path):
    text = run("train_gpt.py", tmp_path, "--help", limit_s=60)
    for name in SMALL | {"lr": 0, "seed": 0}:
        assert re.search(rf"^ +--{name} \S+ +\w.*\(default: \S+\)$", text, re.M), name
    for name in ("bf16", "describe"):
        assert re.search(rf"^ +--{name} +\w", text, re.M), name


@pytest.mark.slow
def test_train_models_prints_the_losses_of_those_asked_for(tmp_path):
    flags = ("--models", "decoder", "--steps", "12", "--rows", "8", "--devices", "4")
    text = run("train_models.py", tmp_path, *flags, limit_s=150)
    found = re.fullmatch(r"decoder +loss (\S+) -> (\S+)\n", text)
    assert found, text
    before, after = map(float, found.groups())
    assert after < before / 2


@pytest.mark.slow
def test_train_float16_skips_overflows_and_learns(tmp_path):
    flags = ("--steps", "40", "--width", "32", "--depth", "1", "--devices", "4")
    flags += ("--batch", "30", "--growth-interval", "20")
    text = run("train_float16.py", tmp_path, *flags, limit_s=100)
    steps = re.findall(
        r"^step +(\d+)  loss (\S+)  scale 2\*\*(\d+)(  skipped: .*)?$", text, re.M
    )
    skipped = [int(exponent) for _, _, exponent, why in steps if why]
    assert skipped[:3] == [24, 23, 22]
    last = text.splitlines()[-1]
    found = re.fullmatch(r"loss (\S+) -> (\S+), (\d+) steps skipped", last)
    assert found, last
    before, after, number = map(float, found.groups())
    assert after < before / 2
    assert number == len(skipped) < 15


@pytest.mark.slow
def test_train_linen_sorts(tmp_path):
    flags = ("--steps", "60", "--width", "16", "--depth", "1", "--devices", "4")
    text = run("train_linen.py", tmp_path, *flags, "--batch", "30", limit_s=100)
    assert "Block_0.Dense_0.kernel" in text
    assert "over 4 devices" in text
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\S+)$", text, re.M)]
    assert len(losses) == 10 and losses[-1] < losses[0] * 0.8
    assert re.fullmatch(r"right digits: \d+%", text.splitlines()[-1])
