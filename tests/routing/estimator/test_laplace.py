"""Laplace posteriors against scipy, brute force and each other."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize

from tfgrpo.routing.estimator.laplace import fit_process, fit_weights, mean_sigmoid, sigmoid


def _problem(seed: int = 0, n: int = 40, d: int = 3):
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n), rng.standard_normal((n, d - 1))])
    trials = rng.integers(1, 6, size=n).astype(float)
    counts = rng.binomial(trials.astype(int), sigmoid(X @ rng.standard_normal(d))).astype(float)
    mean, covariance = rng.standard_normal(d) * 0.1, np.diag(rng.uniform(0.3, 2.0, size=d))
    return X, counts, trials, mean, covariance


def test_weights_are_the_mode_that_a_general_optimiser_finds():
    X, k, n, mean, covariance = _problem()
    precision = np.linalg.inv(covariance)

    def loss(w):
        f = X @ w
        return -np.sum(k * f - n * np.logaddexp(0, f)) + 0.5 * (w - mean) @ precision @ (w - mean)

    found = minimize(loss, np.zeros(3), tol=1e-12)
    fit = fit_weights(X, k, n, mean, covariance)
    np.testing.assert_allclose(fit.mean, found.x, atol=1e-4)
    eps, eye = 1e-3, np.eye(3)

    def bend(a, b):
        corners = [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
        return sum(s * loss(fit.mean + eps * (p * a + q * b)) for p, q, s in corners) / (4 * eps**2)

    hessian = np.array([[bend(a, b) for b in eye] for a in eye])
    np.testing.assert_allclose(fit.covariance, np.linalg.inv(hessian), rtol=1e-3, atol=1e-5)


def test_no_rows_give_back_the_prior():
    _, _, _, mean, covariance = _problem()
    fit = fit_weights(np.zeros((0, 3)), np.zeros(0), np.zeros(0), mean, covariance)
    np.testing.assert_allclose(fit.mean, mean)
    np.testing.assert_allclose(fit.covariance, covariance)


def test_k_of_n_equals_n_rows_of_one_trial():
    X, k, n, mean, covariance = _problem()
    rows, bits = [], []
    for x, successes, trials in zip(X, k, n, strict=True):
        for i in range(int(trials)):
            rows.append(x)
            bits.append(float(i < successes))
    whole = fit_weights(X, k, n, mean, covariance)
    split = fit_weights(np.array(rows), np.array(bits), np.ones(len(bits)), mean, covariance)
    np.testing.assert_allclose(whole.mean, split.mean, atol=1e-6)


def test_separable_data_do_not_diverge():
    X = np.column_stack([np.ones(50), np.linspace(-30, 30, 50)])
    fit = fit_weights(X, (X[:, 1] > 0) * 1.0, np.ones(50), np.zeros(2), np.diag([4.0, 4.0]))
    assert np.isfinite(fit.mean).all()
    assert np.abs(fit.mean).max() < 10


def test_a_linear_kernel_gives_the_same_posterior_as_weights():
    X, k, n, mean, covariance = _problem()
    new = np.array([[1.0, 0.3, -0.2], [1.0, -1.0, 2.0]])
    by_weights = fit_weights(X, k, n, mean, covariance)
    process = fit_process(X @ covariance @ X.T, X @ mean, k, n)
    at = process.predict(
        new @ mean, new @ covariance @ X.T, np.einsum("ij,jk,ik->i", new, covariance, new)
    )
    expected = by_weights.predict(new)
    np.testing.assert_allclose(at.mean, expected.mean, atol=1e-4)
    np.testing.assert_allclose(at.variance, expected.variance, atol=1e-4)
    np.testing.assert_allclose(process.left_out.mean, by_weights.left_out.mean, atol=1e-3)


def test_leave_one_out_is_close_to_refitting_without_the_row():
    X, k, n, mean, covariance = _problem(seed=3, n=60)
    fit = fit_weights(X, k, n, mean, covariance)
    for i in range(0, 60, 7):
        rest = np.arange(60) != i
        alone = fit_weights(X[rest], k[rest], n[rest], mean, covariance).predict(X[[i]])
        assert fit.left_out.mean[i] == pytest.approx(alone.mean[0], abs=0.1)
        assert fit.left_out.variance[i] == pytest.approx(alone.variance[0], rel=0.25)


@pytest.mark.parametrize("mean", [-2.0, 0.0, 0.7, 3.0])
@pytest.mark.parametrize("sd", [0.1, 1.0, 2.0])
def test_the_mean_of_a_sigmoid_is_close_to_its_integral(mean, sd):
    def density(z):
        return np.exp(-z * z / 2) / np.sqrt(2 * np.pi) / (1 + np.exp(-(mean + sd * z)))

    exact, _ = quad(density, -12, 12)
    got = mean_sigmoid(np.array([mean]), np.array([sd**2]))[0]
    assert got == pytest.approx(exact, abs=0.02)
