"""The benchmark's command runs as a user runs it, at small size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULE = Path(__file__).parent.parent / "benchmarks" / "schedule.py"
JUDGED = {
    "config",
    "platform",
    "program",
    "peak_mib",
    "gather_bytes",
    "async_share",
    "hidden_share",
    "compile_s",
}
TINY = ("--config", "tiny-cpu-gpt", "--rounds", "1")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished command, started in another folder."""
    return subprocess.run(
        [sys.executable, str(SCHEDULE), *arguments],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=280,
    )


def rows_of(result: subprocess.CompletedProcess[str]) -> list[dict]:
    """What `--json` printed; the command must have succeeded."""
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(row.keys() >= JUDGED for row in rows)
    assert all(row["error"] is None for row in rows)
    return rows


@pytest.mark.slow
def test_cpu_rows_are_timed_against_automatic_partitioning(tmp_path):
    result = run(tmp_path, *TINY, "--topology", "cpu:2", "--blocks", "1", "--json")
    rows = {row["program"]: row for row in rows_of(result)}
    assert list(rows) == ["unsharded", "auto", "keep", "ours"]
    for row in rows.values():
        assert row["platform"] == "cpu"
        assert row["losses_equal"]
        assert row["step_ms"] > 0
    assert rows["auto"]["step_vs_auto"] == rows["unsharded"]["step_vs_unsharded"] == 1
    assert rows["unsharded"]["wire_bytes"] == 0
    assert 0 < rows["keep"]["gather_bytes"] < rows["ours"]["gather_bytes"]
    assert "round 1 of 1" in result.stderr
    (tmp_path / "rows.jsonl").write_text(result.stdout)
    ((code, out, _),) = run_in_one(tmp_path, ["--tables", "rows.jsonl"])
    table = out.splitlines()
    assert (code, table[0]) == (0, "**tiny-cpu-gpt, 1 blocks, cpu:2**")
    assert [line.split()[1] for line in table[4:8]] == list(rows)


@pytest.mark.slow
def test_tables_name_versions_and_say_why_a_row_failed(tmp_path):
    names = ("ours+ahead", "auto", "ours[own,own,own]")
    programs = [part for name in names for part in ("--program", name)]
    result = run(tmp_path, *TINY, *programs, "--topology", "cpu:8", "--blocks", "1")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "**tiny-cpu-gpt, 1 blocks, cpu:8**"
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1  # aligned
    assert re.match(r"\| ours\+ahead +\|( +\|)+$", table[2])
    assert re.match(r"\| auto +\| .* 1\.00 \|", table[3])
    assert re.match(r"\| ours\[own,own,own\] \| .* yes \|", table[4])
    why = (
        "- ours+ahead failed: ValueError: ours+ahead is for models with scanned layers"
    )
    assert why in lines
    versions = r"^\d{4}-\d\d-\d\d, Python 3\..*, jax \d+\."
    assert re.search(versions, result.stdout, re.M)


IN_ONE = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
main = runpy.run_path(sys.argv[1] + "/schedule.py")["main"]
for arguments in json.loads(sys.argv[2]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue().splitlines()[-1:]]))
"""


def run_in_one(folder: Path, *commands: list[str]) -> list[tuple[int, str, list[str]]]:
    """Status, output and last words of each command that is over at once."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE, str(SCHEDULE.parent), json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_help_and_wrong_arguments_are_told(tmp_path):
    cases = [
        (["--config", "gigantic"], "invalid choice: 'gigantic'"),
        (["--config", "nano"], "--config nano needs --topology"),
        (["--program", "theirs"], "unknown program 'theirs'"),
        (["--program", "ours[free,free]"], "unknown ordering in 'ours[free,free]'"),
        (["--topology", "cpu:9"], "unknown topology 'cpu:9'"),
        (["--topology", "v5e:0x4"], "no such slice 'v5e:0x4'"),
        (["--platform", "cpu", "--config", "llama-7b"], "nothing to compare"),
        (["--tables", "nowhere.jsonl"], "No such file"),
        (["--blocks", "0"], "expected a number from 1, got '0'"),
    ]
    commands = [["--help"], *(arguments for arguments, _ in cases)]
    (code, text, _), *results = run_in_one(tmp_path, *commands)
    assert code == 0
    for option in ("platform", "config", "program", "topology", "blocks", "rounds"):
        assert f"--{option}" in text
    for program in ("auto", "unsharded", "keep", "ours+options", "ours+ahead"):
        assert re.search(rf"^ +{re.escape(program)} +\w", text, re.M), program
    for (arguments, told), (code, out, last) in zip(cases, results, strict=True):
        assert (code, out) == (2, ""), arguments
        assert told in last[0]


@pytest.mark.needs_tpu_compiler
def test_tpu_rows_compare_memory_and_overlap(tmp_path):
    names = ("--program", "auto", "--program", "keep", "--program", "ours")
    cases = ("--config", "nano", "--config", "nano-llama", "--topology", "v5e:2x2")
    result = run(tmp_path, *names, *cases, "--json")
    rows = rows_of(result)
    assert [(r["config"], r["program"]) for r in rows] == [
        (config, program)
        for config in ("nano", "nano-llama")
        for program in ("auto", "keep", "ours")
    ]
    for row in rows:
        assert row["platform"] == "tpu" and row["topology"] == "v5e:2x2"
        assert row["peak_mib"] > 0 and row["compile_s"] > 0
        assert 0 <= row["hidden_share"] <= 1 and 0 < row["async_share"] <= 1
    auto, _, ours = rows[:3]
    assert auto["peak_vs_auto"] == 1
    assert ours["peak_vs_auto"] == round(ours["peak_mib"] / auto["peak_mib"], 3)
    assert "~" in ours["schedule"]
