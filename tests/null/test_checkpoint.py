"""Boxes, who writes what, values as JSON, and the index."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoflow.checkpoint.arrange import PIECE, head_of, in_own_files, in_whole_files, shares
from monoflow.checkpoint.boxes import cut, meet, num_elements, runs, whole_box, within
from monoflow.checkpoint.held import Held, Holders, Layout, held, memory_of
from monoflow.checkpoint.index import INDEX, Index, checksum
from monoflow.checkpoint.tree import decode, encode, tensor_names
from monoflow.errors import CheckpointError
from monoflow.sbp.layout import B, P, S, shard

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple]:
    shape = draw(SHAPES)
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, tuple(box)


@given(boxes())
def test_runs_are_where_the_elements_are(case: tuple) -> None:
    shape, box = case
    starts, length = runs(box, whole_box(shape))
    found = np.concatenate([np.arange(start, start + length) for start in starts])
    flat = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    assert found.tolist() == flat[within(box, whole_box(shape))].reshape(-1).tolist()


def test_runs_join_where_rows_are_whole() -> None:
    whole = whole_box((4, 3, 2))
    assert [
        one.tolist() if isinstance(one, np.ndarray) else one for one in runs(((1, 3), (0, 3), (0, 2)), whole)
    ] == [[6], 12]
    starts, length = runs(((0, 4), (1, 3), (0, 2)), whole)
    assert (starts.tolist(), length) == ([2, 8, 14, 20], 4)


@given(boxes(), st.integers(1, 20))
def test_pieces_make_up_the_box(case: tuple, most: int) -> None:
    shape, box = case
    marks = np.zeros(shape, dtype=int)
    for piece in cut(box, most):
        assert num_elements(piece) <= most
        assert len(runs(piece, box)[0]) == 1  # contiguous within the box
        marks[within(piece, whole_box(shape))] += 1
    inside = np.zeros(shape, dtype=int)
    inside[within(box, whole_box(shape))] = 1
    assert (marks == inside).all()


def test_boxes_meet() -> None:
    assert meet(((0, 3), (2, 5)), ((2, 9), (0, 3))) == ((2, 3), (2, 3))
    assert meet(((0, 3),), ((3, 4),)) is None
    assert meet((), ()) == ()


# --- who holds and writes what ---------------------------------------------------------------------

LAYOUTS = {
    "whole": Layout((0, 1, 2, 3), (4,), (B,)),
    "rows": Layout((0, 1, 2, 3), (4,), (S(0),)),
    "columns of half": Layout((0, 1, 2, 3), (2, 2), (B, S(1))),
    "blocks": Layout((0, 1, 2, 3), (4,), (S(1, 2),)),
    "rows twice": Layout((0, 1, 2, 3), (2, 2), (S(0), S(0))),
    "two of four": Layout((1, 3), (2,), (S(0),)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_written_once_by_a_rank_that_has_it(name: str) -> None:
    layout = LAYOUTS[name]
    whole = torch.arange(7 * 8).view(7, 8)
    one = Held((7, 8), torch.int64, layout, torch.empty(0))
    holders = Holders()
    copy = torch.full((7, 8), -1)
    for share in shares({"x": one}, (0, 1, 2, 3), holders, PIECE, is_cut=True):
        index = layout.ranks.index(share.rank)
        coordinate = tuple(int(i) for i in np.unravel_index(index, layout.mesh))
        local = shard(whole, layout.sbp, layout.mesh, coordinate)
        (part,) = [
            p for p in holders.parts("x", (7, 8), layout, share.rank) if meet(p.box, share.box) == share.box
        ]
        place = within(share.box, whole_box((7, 8)))
        assert (copy[place] == -1).all()
        copy[place] = memory_of(local, part, share.box)
    assert torch.equal(copy, whole)


def test_replicas_share_the_bytes() -> None:
    sizes = {f"small {i}": (64, 1024) for i in range(9)} | {"large": (4096, 1024)}
    tensors = {
        name: Held(shape, torch.float32, Layout((0, 1, 2), (3,), (B,)), torch.empty(0))
        for name, shape in sizes.items()
    }
    loads = dict.fromkeys(range(3), 0)
    for share in shares(tensors, (0, 1, 2), Holders(), PIECE, is_cut=True):
        loads[share.rank] += num_elements(share.box) * 4
    total = sum(loads.values())
    assert total == (9 * 64 + 4096) * 1024 * 4
    assert max(loads.values()) < 1.1 * total / 3


def test_partial_values_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x is P\(sum\): its ranks hold partial values"):
        Holders().owners("x", (4,), Layout((0, 1), (2,), (P,)))


def test_ranks_that_save_must_hold_everything() -> None:
    one = Held((4,), torch.float32, Layout((0, 1), (2,), (S(0),)), torch.empty(0))
    with pytest.raises(CheckpointError, match=r"x lies on ranks \[1\]; of them none of \[0\] saves"):
        list(shares({"x": one}, (0,), Holders(), PIECE, is_cut=True))


def test_own_files_hold_what_a_rank_writes() -> None:
    layout = Layout((0, 1), (2,), (S(1),))
    files = {"model.safetensors": {"x": Held((2, 4), torch.float32, layout, torch.empty(0))}}
    made = in_own_files(files, (0, 1), "0123456789ab")
    names = [f"model-0123456789ab-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert list(made.sizes) == names
    assert [e.file for e in made.entries["x"]] == names
    assert [e.box for e in made.entries["x"]] == [((0, 2), (0, 2)), ((0, 2), (2, 4))]
    header = json.loads(made.heads[names[1]][8:])
    assert header["x[0:2, 2:4]"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_whole_files_do_not_depend_on_the_layout() -> None:
    made = [
        in_whole_files({"a": {"x": Held((8, 8), torch.bfloat16, layout, torch.empty(0))}}, (0, 1, 2, 3))
        for layout in LAYOUTS.values()
    ]
    assert all(
        (one.heads, one.sizes, one.entries) == (made[0].heads, made[0].sizes, made[0].entries) for one in made
    )


def test_arrays_are_aligned() -> None:
    head, begins, size = head_of(
        {"a": (torch.uint8, (3,)), "b": (torch.float64, (2,)), "c": (torch.bfloat16, ())}
    )
    assert len(head) % 8 == 0
    assert [begins[name] - len(head) for name in "bca"] == [0, 16, 18]
    assert size == len(head) + 21
    with pytest.raises(CheckpointError, match=r"z has dtype torch.complex128, which safetensors cannot hold"):
        head_of({"z": (torch.complex128, (1,))})


def test_a_plain_tensor_is_whole_on_every_rank() -> None:
    one = held(torch.ones(3, 2), (0, 1))
    assert list(Holders().owners("x", one.shape, one.layout).items()) == [(((0, 3), (0, 2)), [0, 1])]


# --- values ----------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=50)
def test_values_come_back_as_they_were(value: object) -> None:
    text = json.dumps(encode(value, "x", {}), allow_nan=False)
    assert repr(decode(json.loads(text), lambda name: torch.empty(0))) == repr(value)


def test_tensors_are_kept_by_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), (torch.zeros(1), Counter({3: 2}))], "n": float("nan"), "t": torch.bfloat16}
    encoded = json.loads(json.dumps(encode(value, "x", tensors)))
    assert list(tensors) == tensor_names(encoded) == ["x.a.0", "x.a.1.0"]
    again = decode(encoded, tensors.__getitem__)
    assert again["a"][0] is value["a"][0]
    assert again["a"][1][1] == Counter({3: 2}) and type(again["a"][1][1]) is Counter
    assert np.isnan(again["n"]) and again["t"] is torch.bfloat16


def test_other_objects_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x\.a\.1 is a object, which a checkpoint does not hold"):
        encode({"a": [1, object()]}, "x", {})


# --- the index -------------------------------------------------------------------------------------


def index_text(**changes: object) -> bytes:
    body = (
        json.loads(json.loads(Index({}, {}, {"versions": {"monoflow": "0.0.1"}}).dumps())["body"]) | changes
    )
    text = json.dumps(body)
    return json.dumps({"checksum": checksum(text.encode()), "body": text}).encode()


def test_an_index_of_another_version_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=rf"{INDEX} has format version 0, .* reads version 1; .*monoflow 0.0.1"
    ):
        Index.parse(index_text(version=0), INDEX)


def test_a_damaged_index_is_refused() -> None:
    text = bytearray(index_text())
    text[text.index(b"0.0.1")] ^= 1
    with pytest.raises(CheckpointError, match=r"is damaged: its checksum is [0-9a-f]{16}, not [0-9a-f]{16}"):
        Index.parse(bytes(text), INDEX)
    with pytest.raises(CheckpointError, match="does not parse"):
        Index.parse(b"{", INDEX)
    with pytest.raises(CheckpointError, match="no index of a monoflow checkpoint"):
        Index.parse(index_text(format="x"), INDEX)
    with pytest.raises(CheckpointError, match="lacks what an index has"):
        Index.parse(index_text(tensors={"x": {}}), INDEX)
