"""Compiled code that is kept: found by all that it depends on, by nothing less, and not if it is damaged."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from monoflow.lower import compiled, kept
from monoflow.lower.pieces import Look, Piece, _value_key, cut, prepared
from monoflow.runtime.program import task_module
from monoflow.sbp.ops.random import draw, states

aten = torch.ops.aten
Chain = Callable[[fx.Graph, fx.Node], fx.Node]


def piece(*ops: Chain, rows: int = 3) -> Piece:
    """A piece of six sines and what is asked for."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for one in (*[called(aten.sin.default)] * 6, *ops):
        x = one(graph, x)
    graph.output([x])
    return cut(prepared(task_module(graph), [Look.of(torch.randn(rows, 2))]), lambda name: None)[0]


def called(function: Any, *rest: Any) -> Chain:
    return lambda graph, x: graph.call_function(function, (x, *rest))


def test_equal_pieces_have_one_digest_and_others_have_others():
    name = kept.digest(piece(called(aten.add.Tensor, 1.0)).key)
    assert name is not None
    assert kept.digest(piece(called(aten.add.Tensor, 1.0)).key) == name
    others = [piece(called(aten.add.Tensor, value)) for value in (2.0, 1, -0.0, 0.0)]
    others += [piece(called(aten.add.Tensor, 1.0), rows=4), piece(called(aten.sub.Tensor, 1.0))]
    names = {kept.digest(one.key) for one in others}
    assert len(names) == len(others) and name not in names and None not in names


def test_functions_of_the_package_are_told_apart_by_what_they_hold():
    def plus(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + number

    # A function of this test: nobody knows what it will be in the next run.
    assert kept.digest(piece(called(plus(1))).key) is None
    ours = [(draw.__code__, number, operator.getitem, torch.device("cpu")) for number in (1, 2)]
    names = {kept.digest(one) for one in [*ours, (states.__code__, 1, operator.getitem, torch.device("cpu"))]}
    assert len(names) == 3 and None not in names


def test_what_is_not_known_in_another_run_has_none():
    assert kept.digest((object(),)) is None
    table = torch.ones(3)
    assert kept.digest((_value_key(table),)) is None
    assert kept.digest((_value_key({"scale": [table]}),)) is None
    assert _value_key(table) == _value_key(table) != _value_key(torch.ones(3))
    assert kept.digest((torch.ops.onednn.qconv2d_pointwise.default,)) is None


def test_settings_are_part_of_it(monkeypatch: pytest.MonkeyPatch):
    key = piece().key
    names = {kept.digest(key)}
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER_BUILD_SEPARATE", "1")
    names.add(kept.digest(key))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    names.add(kept.digest(key))
    torch.set_num_threads(threads)
    monkeypatch.setattr(kept, "_sources", lambda: "another version")
    names.add(kept.digest(key))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")  # where it is kept is not
    names.add(kept.digest(key))
    assert len(names) == 4


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept, "loaded", lambda library: library.read_bytes)  # stands in for a function
    return tmp_path / "monoflow"


def test_what_is_kept_is_found_until_it_is_damaged(folder: Path, tmp_path: Path):
    library = tmp_path / "made.so"
    library.write_bytes(b"code")
    assert kept.find("name") is None
    kept.keep("name", library, [(0, 8, 3)])
    found = kept.find("name")
    assert found is not None and found.checks == ((0, 8, 3),)
    assert sorted(one.name for one in folder.iterdir()) == ["name.json", "name.so"]
    whole = (folder / "name.json").read_text()
    assert json.loads(whole)["sha256"] == hashlib.sha256(b"code").hexdigest()
    for damage in (whole[:-9], "[]", '{"sha256": 1}', ""):
        (folder / "name.json").write_text(damage)
        assert kept.find("name") is None
    (folder / "name.json").write_text(whole)
    assert kept.find("name") is not None
    (folder / "name.so").write_bytes(b"cod")
    assert kept.find("name") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path / "file" / "below")
    library = tmp_path / "made.so"
    library.write_bytes(b"code")
    kept.keep("name", library, [])
    assert kept.find("name") is None


def test_a_piece_whose_code_is_kept_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    one = piece(called(aten.add.Tensor, 1.0))
    name = kept.digest(one.key)
    assert name is not None
    monkeypatch.setattr(kept, "loaded", lambda library: lambda tensors: [tensors[0].sin()])
    folder.mkdir()
    (folder / "made").write_bytes(b"code")
    kept.keep(name, folder / "made", [])

    def fails(*args: Any) -> Any:
        raise AssertionError("it is compiled")

    monkeypatch.setattr(compiled, "compile_graph", fails)
    code = compiled.Code(one)
    code.begin(fails)
    code.finish()
    assert code.is_compiled and not code.problem
