"""Rules of look-ups."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from monoflow.sbp.layout import B, P, S
from monoflow.sbp.oracle import missing_signatures
from monoflow.sbp.rules.embedding import RULES, embedding_shard
from monoflow.sbp.signature import LocalCall, TensorMeta, TensorShard
from tests.null.rule_trial import holds, integers, proven, values

aten = torch.ops.aten
LOOK_UP, BACKWARD = aten.embedding.default, aten.embedding_dense_backward.default


@pytest.mark.parametrize("rows", [7, 8, 3])
@pytest.mark.parametrize("shape", [(5,), (2, 6), ()])
def test_look_up(rows, shape):
    args = (values(rows, 4), integers(rows, *shape))
    found = proven(RULES[LOOK_UP], LOOK_UP, *args)
    holds(found, "S(0), B -> P(sum)", f"S(1), B -> S({len(shape)})", "P(sum), B -> P(sum)")
    holds(found, *(f"B, S({d}) -> S({d})" for d in range(len(shape))))
    assert missing_signatures(LOOK_UP, args, {}, RULES[LOOK_UP], 2) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_look_up_in_narrow_floats(dtype):
    proven(RULES[LOOK_UP], LOOK_UP, values(7, 4, dtype=dtype), integers(7, 2, 3))


def test_look_up_with_its_other_arguments():
    found = proven(RULES[LOOK_UP], LOOK_UP, values(7, 4), integers(7, 2, 3), 3, True)
    holds(found, "S(0), B -> P(sum)")


def test_other_rows_add_exactly_nothing():
    weight = torch.full((4, 3), float("nan"))
    rows = embedding_shard(weight, torch.tensor([0, 5]), 8, (4, 8))
    assert rows[0].tolist() == [0.0] * 3 and rows[1].isnan().all()


def _local(weight, index, size, sbp, coordinate):
    """The look-up in one of two shards of a table of `size` rows."""
    shards = [
        TensorShard(TensorMeta((size, 3), weight.dtype), (sbp[0],), (2,), (coordinate,)),
        TensorShard(TensorMeta(tuple(index.shape), index.dtype), (sbp[1],), (2,), (coordinate,)),
    ]
    out = TensorShard(TensorMeta((*index.shape, 3), weight.dtype), (sbp[2],), (2,), (coordinate,))
    return RULES[LOOK_UP].local(LocalCall(LOOK_UP, (weight, index), {}, shards, [out]))  # pyright: ignore


@pytest.mark.parametrize("bad", [-1, 7, 100, -100])
@pytest.mark.parametrize(
    ("sbp", "rows"), [((B, B, B), 7), ((S(0), B, P), 4), ((S(1), B, S(1)), 7), ((P, B, P), 7)]
)
def test_an_index_out_of_the_whole_table_raises_on_every_layout(sbp, rows, bad):
    op, args, kwargs = _local(values(rows, 3), torch.tensor([2, bad, 1]), 7, sbp, 0)
    with pytest.raises(IndexError, match=rf"index {bad} is out of range for a vocabulary of 7 rows"):
        op(*args, **kwargs)


def test_an_index_of_another_shard_is_no_error():
    op, args, kwargs = _local(values(4, 3), torch.tensor([6, 2]), 7, (S(0), B, P), 0)
    assert op(*args, **kwargs)[0].tolist() == [0.0] * 3


def test_local_form_can_be_traced():
    weight, index = values(4, 3), torch.tensor([1, 5])
    graph = make_fx(lambda w, i: embedding_shard(w, i, 8, (0, 4)), tracing_mode="fake")(weight, index)
    assert torch.equal(graph(weight, index), embedding_shard(weight, index, 8, (0, 4)))
    with pytest.raises(IndexError, match=r"index 9 .* 8 rows"):
        graph(weight, torch.tensor([9, 1]))


@pytest.mark.parametrize("padding", [-1, 0, 5])
@pytest.mark.parametrize("rows", [7, 8, 3])
@pytest.mark.parametrize("shape", [(5,), (4, 6)])
def test_backward(shape, rows, padding):
    args = (values(*shape, 4), integers(rows, *shape), rows, padding, False)
    found = proven(RULES[BACKWARD], BACKWARD, *args)
    holds(found, "B, B -> S(0)", f"S({len(shape)}), B -> S(1)", "P(sum), B -> P(sum)")
    holds(found, *(f"S({d}), S({d}) -> P(sum)" for d in range(len(shape))))
    assert missing_signatures(BACKWARD, args, {}, RULES[BACKWARD], 2) == []


@pytest.mark.parametrize("padding", [-1, 2])
def test_backward_by_frequency_needs_the_whole_index(padding):
    found = proven(RULES[BACKWARD], BACKWARD, values(9, 4), integers(4, 9), 5, padding, True)
    assert found == {"B, B -> S(0)", "S(1), B -> S(1)", "P(sum), B -> P(sum)"}


def test_index_check_is_a_well_made_op():
    torch.library.opcheck(torch.ops.monoflow.check_index.default, (integers(7, 2, 3), 7))
