"""`kernel-loader convert`, as a person and a program see it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

LAYOUT = """
from kernel_loader.fusion.converter import WeightConverter
from kernel_loader.fusion.operations import Concatenate, Transpose

CONVERTERS = [
    WeightConverter(["layers.*.gate.weight", "layers.*.up.weight"], "layers.*.gate_up.weight", [Concatenate(0)]),
    WeightConverter("head.weight", "lm_head.weight"),
]

class Layout:
    conversion_mapping = CONVERTERS

class Nested:
    Inner = Layout

broken = [1]
empty = []
number = 3

class OfInstances:
    conversion_mapping = property(lambda self: CONVERTERS)
"""


def state_dict():
    names = ["embed.weight", "layers.0.gate.weight", "layers.0.up.weight", "head.weight"]
    return {name: torch.full((2, 3), float(i)) for i, name in enumerate(names)}


@pytest.fixture
def run(tmp_path):
    """Run the command where a layout is, beside a checkpoint `in`; gives exit status, output and errors."""
    (tmp_path / "layout.py").write_text(LAYOUT)
    (tmp_path / "in").mkdir()
    save_file(state_dict(), tmp_path / "in" / "model.safetensors")

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "kernel_loader", "convert", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def same(got, want):
    return got.keys() == want.keys() and all(got[name].equal(want[name]) for name in want)


def test_a_checkpoint_is_converted_and_reverted(run, tmp_path):
    status, out, errors = run("in", "out", "--layout", "layout:CONVERTERS")
    assert (status, errors) == (0, "")
    assert out == (f"{tmp_path / 'out'}: 1 shard; 2 groups converted, 1 tensor kept; the way back is bit for bit\n")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        "embed.weight", "layers.0.gate_up.weight", "lm_head.weight",
    }  # fmt: skip
    status, out, _ = run(
        "out", "back", "--layout", "layout:Nested.Inner", "--revert", "--max-shard-size", "30B", "--json"
    )
    assert status == 0
    assert json.loads(out) == {
        "out": str(tmp_path / "back"),
        "converted": 2,
        "kept": 1,
        "exact": True,
        "shards": [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)],
        "reused": 0,
    }
    back = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        back |= load_file(file)
    assert same(back, state_dict())


def test_a_dry_run_shows_the_plan_and_writes_nothing(run, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    status, out, _ = run("in", "--layout", "layout:Layout", "--dry-run")
    assert status == 0
    assert out.splitlines() == [
        "layers.0.gate.weight float32[2, 3]",
        "layers.0.up.weight float32[2, 3]",
        "    Concatenate(dim=0, sizes=None, parts=2)",
        "  → layers.0.gate_up.weight float32[4, 3]",
        "head.weight float32[2, 3]",
        "    Rename()",
        "  → lm_head.weight float32[2, 3]",
        "2 groups converted, 1 tensor kept; the way back is bit for bit",
    ]
    status, out, _ = run("in", "out", "--layout", "layout:Layout", "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["kept"] == ["embed.weight"]
    assert plan["exact"]
    assert plan["groups"][1] == {
        "sources": ["head.weight float32[2, 3]"],
        "operations": ["Rename()"],
        "targets": ["lm_head.weight float32[2, 3]"],
    }
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before


def test_a_problem_is_one_paragraph(run):
    status, out, errors = run("in", "out", "--layout", "layout:CONVERTERS", "--revert")
    assert (status, out) == (1, "")
    assert len(errors.splitlines()) == 1
    assert "layers.*.gate_up.weight: matches none of 4 names, such as embed.weight" in errors
    assert "lm_head.weight: matches none of 4 names" in errors


def test_a_dry_run_refuses_what_the_run_would(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    real, dry = (run("in", "out", "--layout", "layout:CONVERTERS", *options) for options in ([], ["--dry-run"]))
    assert (
        dry
        == real
        == (1, "", f"kernel-loader: {tmp_path / 'out'} is there already. Give another directory, or remove that one.\n")
    )


WRONG = {
    "no out": (["in", "--layout", "layout:CONVERTERS"], "Missing argument 'OUT'"),
    "no layout": (["in", "out"], "Missing option '--layout'"),
    "no module": (["in", "out", "--layout", "nowhere:X"], "nowhere:X cannot be imported (No module named 'nowhere')"),
    "no name": (["in", "out", "--layout", "layout"], "layout is not of the form module:NAME"),
    "no such name": (["in", "out", "--layout", "layout:X"], "has no attribute 'X'"),
    "no converters": (["in", "out", "--layout", "layout:broken"], "layout:broken: 1 is no WeightConverter"),
    "none at all": (["in", "out", "--layout", "layout:empty"], "layout:empty has no converters"),
    "a number": (["in", "out", "--layout", "layout:number"], "layout:number: 3 is no WeightConverter, and no list"),
    "of instances": (
        ["in", "out", "--layout", "layout:OfInstances"],
        "layout:OfInstances.conversion_mapping: <property",
    ),
    "size": (
        ["in", "out", "--layout", "layout:CONVERTERS", "--max-shard-size", "big"],
        "'big' is not of the form 500MB",
    ),
    "unit": (["in", "out", "--layout", "layout:CONVERTERS", "--max-shard-size", "5XB"], "'5XB' is not of the form"),
    "no bytes": (["in", "out", "--layout", "layout:CONVERTERS", "--max-shard-size", "0.9B"], "'0.9B' is not of"),
    "endless": (["in", "out", "--layout", "layout:CONVERTERS", "--max-shard-size", "9" * 400], "is not of the form"),
    "size of a dry run": (["in", "--dry-run", "--layout", "layout:CONVERTERS", "--max-shard-size", "big"], "'big' is"),
    "no in": (["elsewhere", "out", "--layout", "layout:CONVERTERS"], "does not exist"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_command_line_that_means_nothing_is_explained(run, tmp_path, arguments, message):
    status, out, errors = run(*arguments)
    assert (status, out) == (2, "")
    assert message in " ".join(errors.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
