"""trust: the solver, the Fisher product and the line search against what they stand for."""

import math

import pytest
import torch
from torch.func import hessian

from posttrain.math import kl, trust


def positive(n: int, seed: int, condition: float = 10.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random symmetric matrix with eigenvalues from 1 to `condition`, and a right-hand side."""
    g = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))
    values = torch.linspace(0, math.log(condition), n, dtype=torch.float64).exp()
    return Q @ values.diag() @ Q.T, torch.randn(n, generator=g, dtype=torch.float64)


# ---------------------------------------------------------------- the solver


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_n_products_solve_n_unknowns(n: int, seed: int) -> None:
    A, b = positive(n, seed)
    products = []

    def product(v: torch.Tensor) -> torch.Tensor:
        products.append(v)
        return A @ v

    x, image = trust.conjugate_gradient(product, b, iterations=n, tolerance=0.0)
    torch.testing.assert_close(x, torch.linalg.solve(A, b), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(image, A @ x, rtol=1e-7, atol=1e-9)
    assert len(products) <= n


def test_each_product_lowers_the_error_and_none_is_wasted() -> None:
    """In the norm of A; after k products no other point of the Krylov space is nearer."""
    A, b = positive(12, seed=5, condition=200.0)
    wanted, errors = torch.linalg.solve(A, b), []
    krylov = [b]
    for k in range(1, 9):
        x, _ = trust.conjugate_gradient(lambda v: A @ v, b, iterations=k, tolerance=0.0)
        errors.append(float((x - wanted) @ A @ (x - wanted)))
        K = torch.stack(krylov, dim=1)
        best = K @ torch.linalg.solve(K.T @ A @ K, K.T @ b)
        assert errors[-1] == pytest.approx(float((best - wanted) @ A @ (best - wanted)), rel=1e-3)
        krylov.append(A @ krylov[-1])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 50


def test_it_stops_where_it_is_near_enough_and_says_so_by_its_products() -> None:
    A, b = positive(30, seed=1, condition=1.5)
    count = 0

    def product(v: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return A @ v

    x, _ = trust.conjugate_gradient(product, b, iterations=30, tolerance=1e-8)
    assert count < 12
    residual = b - A @ x
    assert float(residual @ residual) <= 1e-8 * float(b @ b)
    start = b.clone()
    assert not trust.conjugate_gradient(product, torch.zeros(30), iterations=5)[0].any()
    assert torch.equal(b, start), "the right-hand side is not changed"


# ---------------------------------------------------------------- the Fisher product


@pytest.mark.parametrize("V", [2, 5])
def test_softmax_fisher_is_the_second_derivative_of_the_kl(V: int) -> None:
    g = torch.Generator().manual_seed(V)
    logits, u = torch.randn(2, 4, V, generator=g, dtype=torch.float64)
    p = logits.log_softmax(-1)
    got = trust.softmax_fisher(p, u)
    for n in range(4):

        def distance(z: torch.Tensor, n: int = n) -> torch.Tensor:
            return kl.exact(p[n], z.log_softmax(-1))

        H = hessian(distance)(logits[n])
        torch.testing.assert_close(got[n], H @ u[n])
        # the covariance of the score, from its other side
        scores = torch.eye(V, dtype=torch.float64) - p[n].exp()
        torch.testing.assert_close(H, (scores.T * p[n].exp()) @ scores)


def test_softmax_fisher_sees_no_constant_and_no_dead_token() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0]]).double().log()
    assert not trust.softmax_fisher(p, torch.full((1, 3), 4.0, dtype=torch.float64)).any()
    only_dead = torch.tensor([[0.0, 0.0, 9.0]]).double()
    assert not trust.softmax_fisher(p, only_dead).any()


# ---------------------------------------------------------------- how far


@pytest.mark.parametrize("max_kl", [1e-4, 0.01, 2.0])
def test_the_step_length_reaches_the_bound_of_the_quadratic_model(max_kl: float) -> None:
    F, s = positive(6, seed=2)
    step = trust.step_length(s, F @ s, max_kl) * s
    assert float(step @ F @ step) / 2 == pytest.approx(max_kl)


def test_a_direction_without_curvature_is_not_walked() -> None:
    s = torch.ones(3)
    assert trust.step_length(s, torch.zeros(3), 0.01) == 0.0
    assert trust.step_length(s, -s, 0.01) == 0.0
    assert trust.step_length(s, torch.full((3,), math.nan), 0.01) == 0.0


def search(gains: list[float], kls: list[float], tries: int = 4) -> tuple[tuple[float, ...], list[float]]:
    """(what the line search found with max_kl 0.3 and halves, the shares that it asked of)."""
    asked: list[float] = []

    def judge(share: float) -> tuple[float, float]:
        asked.append(share)
        return gains[len(asked) - 1], kls[len(asked) - 1]

    return trust.line_search(judge, max_kl=0.3, shrink=0.5, tries=tries), asked


def test_the_line_search_takes_the_first_share_that_gains_within_the_bound() -> None:
    nan = math.nan
    assert search([1.0], [0.3]) == ((1.0, 1.0, 0.3), [1.0])
    assert search([2.0, 1.0], [0.31, 0.1]) == ((0.5, 1.0, 0.1), [1.0, 0.5])
    assert search([0.0, -1.0, 0.2], [0.1, 0.1, 0.1]) == ((0.25, 0.2, 0.1), [1.0, 0.5, 0.25])
    assert search([nan, 1.0, math.inf, 0.1], [0.1, nan, math.inf, 0.2]) == (
        (0.125, 0.1, 0.2),
        [1.0, 0.5, 0.25, 0.125],
    )
    assert search([1.0] * 4, [0.4] * 4) == ((0.0, 0.0, 0.0), [1.0, 0.5, 0.25, 0.125])
    assert search([1.0] * 4, [0.4] * 4, tries=1) == ((0.0, 0.0, 0.0), [1.0])
