import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tfgrpo.lm.local.counter_rng import draw_tokens, uniforms  # noqa: E402


def draw(logits, temperature=1.0, top_p=1.0, u=None):
    rows = len(logits)
    u = [0.5] * rows if u is None else u
    return draw_tokens(
        torch.tensor(logits, dtype=torch.float32),
        torch.full((rows,), float(temperature)),
        torch.full((rows,), float(top_p)),
        torch.tensor(u, dtype=torch.float64),
    )


def by_hand(logits, temperature, top_p, u):
    """Inverse transform sampling with plain numpy in float64: id order, or size order in a
    nucleus."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.arange(len(p))
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        keep = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        order = order[:keep]
    upto = np.cumsum(p[order])
    return int(order[np.searchsorted(upto, u * upto[-1], side="right")])


@pytest.mark.parametrize("vocabulary", [3, 256, 257, 1000])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1, 1), (0.3, 1), (2.0, 1), (1, 0.7), (0.5, 0.1)]
)
def test_draws_equal_inverse_transform_sampling_by_hand(vocabulary, temperature, top_p):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=(40, vocabulary)) * 2
    u = rng.random(40)
    tokens, _, _ = draw(logits.tolist(), temperature, top_p, u.tolist())
    expected = [by_hand(logits[i].astype(np.float32), temperature, top_p, u[i]) for i in range(40)]
    same = sum(a == b for a, b in zip(tokens.tolist(), expected, strict=True))
    assert same >= 39, "at most one draw may fall on another side by float32 rounding"


def test_logprobs_are_those_of_the_raw_softmax():
    logits = np.random.default_rng(0).normal(size=(5, 300)).tolist()
    for temperature, top_p in ((1, 1), (0.2, 1), (1, 0.5), (0, 1)):
        tokens, logps, _ = draw(logits, temperature, top_p)
        raw = torch.log_softmax(torch.tensor(logits), dim=-1)
        expected = raw[torch.arange(5), tokens]
        assert torch.allclose(logps, expected, atol=1e-5)


def test_temperature_zero_is_the_likeliest_token_whatever_the_number():
    logits = np.random.default_rng(1).normal(size=(8, 500))
    tokens, _, _ = draw(logits.tolist(), 0, 1, [0.999] * 8)
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_frequencies_follow_the_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    n = 4000
    u = [float(uniforms(seed, 1)[0]) for seed in range(n)]
    tokens, _, _ = draw([np.log(p).tolist()] * n, u=u)
    counts = np.bincount(tokens.numpy(), minlength=4)
    chi2 = float((((counts - n * p) ** 2) / (n * p)).sum())
    assert chi2 < 16.27  # 99.9 % point of chi-square with 3 degrees of freedom; draws are fixed


def test_a_token_of_no_probability_is_never_drawn():
    logits = [[-float("inf")] * 255 + [0.0] + [-float("inf")] * 300]
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(logits, u=[u])[0].tolist() == [255]


def test_a_row_does_not_depend_on_its_neighbours():
    logits = np.random.default_rng(2).normal(size=(6, 700)).tolist()
    u = np.random.default_rng(3).random(6).tolist()
    together = draw(logits, 0.8, 1, u)[0].tolist()
    alone = [draw([logits[i]], 0.8, 1, [u[i]])[0].item() for i in range(6)]
    assert together == alone


def test_a_longer_stream_of_uniforms_begins_with_the_shorter():
    assert uniforms(7, 100)[:10].tolist() == uniforms(7, 10).tolist()
    assert uniforms(7, 3).tolist() != uniforms(8, 3).tolist()
    assert uniforms(-1, 1)[0] == uniforms(2**64 - 1, 1)[0]


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(FloatingPointError):
        draw([[0.0, float("nan")]])
