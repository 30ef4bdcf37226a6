"""The decoder and the packed layout against Hugging Face, one sequence at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.tiny import random_rows, tiny_hf
from tfgrpo.errors import ConfigError
from tfgrpo.rl.model.decoder import decoder_from_hf, hf_slices, hf_views
from tfgrpo.rl.model.packing import Row, micro_batches, pack
from tfgrpo.rl.model.shape import shape_of
from tfgrpo.rl.update.logprob import score_tokens


def test_keys_before_each_suffix_are_its_prompts_and_every_token_knows_its_copies() -> None:
    for seed in range(5):
        packed = pack(random_rows(seed=seed))
        seen, n = packed.seen, packed.n_tokens
        sees = torch.zeros(n, n, dtype=torch.bool)
        for (q, q_end), (k, k_end) in zip(
            *(itertools.pairwise(cu.tolist()) for cu in (packed.cu_self, packed.cu_keys)),
            strict=True,
        ):
            for at in range(q, q_end):  # causal from the end, as flash attention counts
                sees[at, seen.token_K[k : k_end - (q_end - at) + 1]] = True
        wanted = torch.zeros(n, n, dtype=torch.bool)
        for index, mask in packed.group_masks:
            wanted[index[:, None], index[None, :]] = mask
        assert torch.equal(sees, wanted)
        bounds = itertools.pairwise(seen.start_T.tolist())
        for token, (first, last) in enumerate(bounds):
            assert set(seen.token_K[seen.order_K[first:last]].tolist()) == {token}
        assert int(seen.start_T[-1]) == len(seen.token_K) == int(packed.cu_keys[-1])
        assert packed.max_keys == int(packed.cu_keys.diff().max())


def naive_logps(model, row: Row) -> torch.Tensor:
    """Log-probs of a row's suffix by a plain forward of the whole sequence."""
    ids = torch.tensor([[*row.prompt_ids, *row.suffix_ids]])
    logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(row.prompt_ids) :, None]).squeeze(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("share", [True, False])
def test_packed_logprobs_and_all_gradients_equal_one_by_one(kind: str, share: bool) -> None:
    model = tiny_hf(kind=kind, dtype=torch.float64)
    decoder = decoder_from_hf(model, share=False)
    rows = random_rows()
    packed = pack(rows, share=share)
    hidden = decoder(packed)[packed.head_D]
    logp_D = torch.nn.functional.linear(hidden, decoder.head_weight).log_softmax(-1)
    logp_D = logp_D.gather(-1, packed.target_D[:, None]).squeeze(-1)
    expected_D = torch.cat([naive_logps(model, row) for row in rows])
    torch.testing.assert_close(logp_D, expected_D, rtol=1e-5, atol=1e-5)

    weight_D = torch.linspace(-1, 1, len(expected_D), dtype=torch.float64)
    (logp_D * weight_D).sum().backward()
    (expected_D * weight_D).sum().backward()
    own = dict(decoder.named_parameters())
    theirs = dict(model.named_parameters())
    for name, ours, first, last in hf_slices(decoder.shape):
        got = own[ours].grad[first:last]
        torch.testing.assert_close(got, theirs[name].grad, rtol=1e-5, atol=1e-6, msg=name)


def test_a_shared_prompt_is_stored_once() -> None:
    rows = random_rows(2, 4)
    shared, repeated = pack(rows), pack(rows, share=False)
    saved = 3 * (len(rows[0].prompt_ids) + len(rows[4].prompt_ids))
    assert repeated.n_tokens - shared.n_tokens == saved


def test_hf_parameters_become_views_that_follow_an_update() -> None:
    model = tiny_hf()
    decoder = decoder_from_hf(model)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    views = hf_views(decoder)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == views[name].data_ptr()
    row = random_rows(1, 1)[0]
    packed = pack([row])
    scored = score_tokens(decoder(packed)[packed.head_D], decoder.head_weight, packed.target_D)
    torch.testing.assert_close(scored.logp_D, naive_logps(model, row), rtol=1e-4, atol=1e-4)


def test_loss_positions_score_the_marked_token_and_not_its_neighbour() -> None:
    row = Row(0, (5, 6), (10, 11, 12, 13), loss_positions=(2,))
    model = tiny_hf(dtype=torch.float64)
    decoder = decoder_from_hf(model, share=False)
    packed = pack([row])
    hidden = decoder(packed)[packed.head_D].double()
    scored = score_tokens(hidden, decoder.head_weight.double(), packed.target_D)
    full = naive_logps(model, Row(0, row.prompt_ids, row.suffix_ids))
    torch.testing.assert_close(scored.logp_D, full[2:3], rtol=1e-6, atol=1e-6)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    limit=st.integers(4, 30),
    whole=st.booleans(),
)
def test_micro_batches_are_the_fewest_and_of_those_the_most_even(groups, limit, whole) -> None:
    rows = []
    for g, (prompt, suffixes) in enumerate(groups):
        rows += [Row(len(rows) + i, (g,) * prompt, (1,) * n) for i, n in enumerate(suffixes)]

    def tokens(batch) -> int:
        prompts = {r.prompt_ids for r in batch}
        return sum(map(len, prompts)) + sum(len(r.suffix_ids) for r in batch)

    def is_sound(batches) -> bool:
        parted = whole and any(
            a[-1].prompt_ids == b[0].prompt_ids for a, b in itertools.pairwise(batches)
        )
        units = (lambda b: len({r.prompt_ids for r in b})) if whole else len
        return not parted and all(tokens(b) <= limit or units(b) == 1 for b in batches)

    def partitions():
        for n_cuts in range(len(rows)):
            for cuts in itertools.combinations(range(1, len(rows)), n_cuts):
                edges = [0, *cuts, len(rows)]
                yield [rows[a:b] for a, b in itertools.pairwise(edges)]

    def largest(batches) -> int:
        return max(map(tokens, batches))

    groups_of = {r.index: r.prompt_ids for r in rows}
    made = micro_batches(rows, limit, together=groups_of if whole else None)
    assert [r.index for batch in made for r in batch] == [r.index for r in rows]
    assert [pack(batch).n_tokens for batch in made] == list(map(tokens, made))
    assert is_sound(made)
    best = min((len(p), largest(p)) for p in partitions() if is_sound(p))
    assert len(made) == best[0]
    if best[1] <= limit:
        assert largest(made) == best[1]


def test_an_empty_completion_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="row 7 has 2 prompt and 0 completion tokens"):
        pack([Row(7, (1, 2), ())])


def test_an_unknown_family_is_refused_with_its_name() -> None:
    import transformers

    with pytest.raises(ConfigError, match="'gpt2' is not one of"):
        shape_of(transformers.GPT2Config())
