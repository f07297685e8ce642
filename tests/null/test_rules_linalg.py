"""Rules of decompositions and solvers."""

import pytest
import torch

from monoflow.sbp.rules.linalg import RULES
from tests.null.rule_trial import proven, values

aten = torch.ops.aten


def _matrices(*batch, n=3, seed=0):
    """Well-conditioned matrices without symmetry."""
    return values(*batch, n, n, seed=seed) + 3 * torch.eye(n, dtype=torch.float64)


def _positive(*batch):
    one = _matrices(*batch)
    return one @ one.mT


def _all(outputs, dims=(0,), inputs=1):
    """The same split of everything, for each batch dim."""
    return {f"{', '.join([f'S({d})'] * inputs)} -> {', '.join([f'S({d})'] * outputs)}" for d in dims}


DECOMPOSITIONS = [
    ("cholesky", 1), ("linalg_cholesky_ex", 2), ("linalg_inv_ex", 2), ("linalg_lu_factor_ex", 3),
    ("linalg_lu", 3), ("linalg_qr", 2), ("_linalg_det", 3), ("_linalg_slogdet", 4), ("_linalg_eigh", 2),
    ("linalg_eig", 2), ("_linalg_svd", 3), ("linalg_matrix_exp", 1), ("linalg_ldl_factor_ex", 3),
    ("geqrf", 2), ("cholesky_inverse", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "outputs"), DECOMPOSITIONS)
def test_a_batch_of_matrices_splits(name, outputs):
    op = getattr(aten, name).default
    assert proven(RULES[op], op, _positive(4, 2)) == _all(outputs, (0, 1))
    assert proven(RULES[op], op, _positive()) == set()


def test_outputs_that_an_option_leaves_empty_are_whole():
    op = aten._linalg_eigh.default
    assert proven(RULES[op], op, _positive(4), "L", False) == {"S(0) -> S(0), B"}
    op = aten.linalg_qr.default
    assert proven(RULES[op], op, _matrices(4), "r") == {"S(0) -> B, S(0)"}


@pytest.mark.parametrize("left", [True, False])
def test_a_system_splits_by_columns_and_is_linear_in_its_right_side(left):
    op = aten.linalg_solve_triangular.default
    side = values(4, 3, 5) if left else values(4, 5, 3)
    found = proven(RULES[op], op, _matrices(4).triu(), side, upper=True, left=left)
    columns = "S(2)" if left else "S(1)"
    assert found == {"S(0), S(0) -> S(0)", f"B, {columns} -> {columns}", "B, P(sum) -> P(sum)"}


def test_a_shared_matrix_is_whole_where_its_sides_split():
    op = aten.linalg_solve_triangular.default
    found = proven(RULES[op], op, _matrices(1).triu(), values(4, 3, 5), upper=True)
    assert found == {"B, S(0) -> S(0)", "B, S(2) -> S(2)", "B, P(sum) -> P(sum)"}


def test_the_factors_of_a_solved_system_do_not_know_its_columns():
    op = aten._linalg_solve_ex.default
    assert proven(RULES[op], op, _matrices(4), values(4, 3, 5)) == {
        "S(0), S(0) -> S(0), S(0), S(0), S(0)",
        "B, S(2) -> S(2), B, B, B",
        "B, P(sum) -> P(sum), B, B, B",
    }
    assert proven(RULES[op], op, _matrices(4), values(4, 3)) == {
        "S(0), S(0) -> S(0), S(0), S(0), S(0)",
        "B, P(sum) -> P(sum), B, B, B",
    }
    assert proven(RULES[op], op, _matrices(), values(3, 5)) == {
        "B, S(1) -> S(1), B, B, B",
        "B, P(sum) -> P(sum), B, B, B",
    }


def test_solvers_from_factors():
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(_matrices(4))
    op = aten.linalg_lu_solve.default
    expected = {"S(0), S(0), S(0) -> S(0)", "B, B, S(2) -> S(2)", "B, B, P(sum) -> P(sum)"}
    assert proven(RULES[op], op, lu, pivots, values(4, 3, 5)) == expected
    op = aten.lu_unpack.default
    assert proven(RULES[op], op, lu, pivots) == {"S(0), S(0) -> S(0), S(0), S(0)"}
    op = aten.cholesky_solve.default
    expected = {"S(0), S(0) -> S(0)", "S(2), B -> S(2)", "P(sum), B -> P(sum)"}
    assert proven(RULES[op], op, values(4, 3, 5), _matrices(4).tril()) == expected
    op = aten.triangular_solve.default
    found = proven(RULES[op], op, values(4, 3, 5), _matrices(4).triu())
    assert found == {"S(0), S(0) -> S(0), S(0)", "S(2), B -> S(2), B", "P(sum), B -> P(sum), B"}


def test_cross_products_are_linear_in_either_side():
    op = aten.linalg_cross.default
    assert proven(RULES[op], op, values(5, 3), values(1, 3)) == {
        "S(0), B -> S(0)", "P(sum), B -> P(sum)", "B, P(sum) -> P(sum)"
    }  # fmt: skip
    assert "S(1), S(1) -> S(1)" in proven(RULES[op], op, values(3, 4), values(3, 4, seed=1), dim=0)
