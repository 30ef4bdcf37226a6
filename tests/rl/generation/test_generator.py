"""The generator against Hugging Face, against re-scoring, and against itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from tests.rl.tiny import tiny_decoder, tiny_hf
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Sampling
from tfgrpo.rl.generation.counter_rng import pick, uniforms
from tfgrpo.rl.generation.generator import GroupGenerator, make_generator
from tfgrpo.rl.generation.kv_cache import Cache
from tfgrpo.rl.generation.requests import GroupRequest
from tfgrpo.rl.generation.scheduler import BatchScheduler
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rl.model.packing import Row, pack
from tfgrpo.rl.update.logprob import score_tokens

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (9, 9)]


def seeds_for(n: int) -> list[list[int]]:
    return [[100 * i + j for j in range(n)] for i in range(len(PROMPTS))]


def make(**options) -> GroupGenerator:
    return GroupGenerator(tiny_decoder(), eos_ids=(2,), **options)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_equals_hf_greedy_token_by_token(kind: str) -> None:
    model = tiny_hf(kind=kind)
    generator = GroupGenerator(decoder_from_hf(model, share=False), eos_ids=(2,))
    made = generator.generate(
        PROMPTS, 1, Sampling(temperature=0.0, max_tokens=20), [[0]] * len(PROMPTS)
    )
    for prompt, (row,) in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        assert list(row.token_ids) == want[0, len(prompt) :].tolist()
        assert (row.finish == "stop") == (row.token_ids[-1] == 2)


def test_sampled_logprobs_equal_a_packed_rescore() -> None:
    generator = make()
    made = generator.generate(PROMPTS, 3, Sampling(temperature=0.8, max_tokens=15), seeds_for(3))
    rows = [Row(0, prompt, one.token_ids) for prompt, group in zip(PROMPTS, made) for one in group]
    packed = pack(rows)
    hidden = generator.decoder(packed)[packed.head_D]
    scored = score_tokens(hidden, generator.decoder.head_weight, packed.target_D)
    sampled = torch.tensor([p for group in made for one in group for p in one.logprobs])
    torch.testing.assert_close(sampled, scored.logp_D, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 3},
        pytest.param({"max_rows": 1}, marks=pytest.mark.real),
        {"poll_steps": 1},
        {"max_rows": 5, "poll_steps": 3},
        {"fixed_rows": True, "max_rows": 16},
    ],
)
def test_samples_do_not_depend_on_slots_refill_or_compaction(options) -> None:
    sampling = Sampling(max_tokens=24)
    want = make(max_rows=64, poll_steps=8).generate(PROMPTS, 4, sampling, seeds_for(4))
    got = make(**options).generate(PROMPTS, 4, sampling, seeds_for(4))
    assert [[r.token_ids for r in g] for g in got] == [[r.token_ids for r in g] for g in want]
    assert [[r.finish for r in g] for g in got] == [[r.finish for r in g] for g in want]


def test_a_row_alone_equals_the_row_in_a_crowd() -> None:
    sampling = Sampling(max_tokens=12)
    crowd = make().generate(PROMPTS, 4, sampling, seeds_for(4))
    alone = make().generate([PROMPTS[2]], 1, sampling, [[seeds_for(4)[2][3]]])
    assert alone[0][0].token_ids == crowd[2][3].token_ids


@pytest.mark.parametrize("threads", [1, 2])
def test_with_fixed_rows_the_neighbours_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sampling = Sampling(max_tokens=24)
        prompts = [*PROMPTS, tuple(range(3, 60))]
        seeds = [[100 * i + j for j in range(4)] for i in range(len(prompts))]

        def rows(chosen: list[int], draws: int) -> dict[tuple[int, int], tuple[float, ...]]:
            generator = make(max_rows=8, fixed_rows=True)
            generator.reserve(8, 128, 24)
            made = generator.generate(
                [prompts[i] for i in chosen], draws, sampling, [seeds[i][:draws] for i in chosen]
            )
            return {
                (i, j): one.logprobs
                for i, group in zip(chosen, made, strict=True)
                for j, one in enumerate(group)
            }

        crowd = rows([0, 1, 2, 3, 4], 4)
        for chosen, draws in (([0], 1), ([2], 3), ([4, 1], 2), ([3, 0], 4)):
            for key, logps in rows(chosen, draws).items():
                assert logps == crowd[key], (chosen, draws, key)
    finally:
        torch.set_num_threads(before)


def test_another_seed_gives_another_sample() -> None:
    made = make().generate([PROMPTS[0]], 6, Sampling(max_tokens=12), [list(range(6))])
    assert len({row.token_ids for row in made[0]}) == 6


def test_each_row_stops_at_its_end_token_or_its_limit() -> None:
    made = make().generate(PROMPTS, 8, Sampling(max_tokens=40), seeds_for(8))
    rows = [row for group in made for row in group]
    assert {row.finish for row in rows} == {"stop", "length"}
    for row in rows:
        assert 2 not in row.token_ids[:-1]
        assert (row.finish == "stop") == (row.token_ids[-1] == 2)
        assert row.finish == "stop" or len(row.token_ids) == 40
        assert len(row.token_ids) == len(row.logprobs)


def test_ignore_eos_reaches_the_limit() -> None:
    sampling = Sampling(max_tokens=40, extra={"ignore_eos": True})
    made = make().generate(PROMPTS, 4, sampling, seeds_for(4))
    assert all(len(row.token_ids) == 40 for group in made for row in group)


def test_the_limit_is_cut_to_the_context() -> None:
    prompt = tuple(range(3, 63)) * 2
    made = make().generate(
        [prompt], 2, Sampling(max_tokens=500, extra={"ignore_eos": True}), [[1, 2]]
    )
    assert [len(row.token_ids) for row in made[0]] == [8, 8]
    assert made[0][0].finish == "length"


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 128 tokens.*context of 128"):
        make().generate([tuple([5] * 128)], 1, Sampling(max_tokens=4), [[0]])


def test_stop_strings_cut_at_the_first_token_that_completes_one() -> None:
    def text_of(ids):
        return "".join(chr(60 + t) for t in ids)

    generator = GroupGenerator(tiny_decoder(), eos_ids=(), detokenize=text_of, poll_steps=5)
    free = generator.generate([PROMPTS[0]], 1, Sampling(max_tokens=20), [[4]])[0][0]
    stop = text_of(free.token_ids[6:8])
    cut = generator.generate([PROMPTS[0]], 1, Sampling(max_tokens=20, stop=(stop,)), [[4]])[0][0]
    assert cut.finish == "stop"
    assert stop in text_of(cut.token_ids) and stop not in text_of(cut.token_ids[:-1])
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


def test_requests_made_by_a_finished_group_are_served_in_the_same_run() -> None:
    generator = make(max_rows=4)
    order = []

    def on_done(request, rows):
        order.append((request.key, len(rows)))
        if request.key == "first":
            return [GroupRequest("second", PROMPTS[2], (8, 9), 5)]
        return []

    generator.run([GroupRequest("first", PROMPTS[0], (1,), 3)], Sampling(), on_done)
    assert order == [("first", 1), ("second", 2)]


def test_a_longer_request_joins_rows_that_are_still_decoding(monkeypatch) -> None:
    monkeypatch.setattr("tfgrpo.rl.generation.kv_cache.LENGTH_STEP", 4)
    sampling = Sampling(extra={"ignore_eos": True})
    generator = make(max_rows=8, poll_steps=2)
    short = GroupRequest("short", PROMPTS[1], (1, 2), 1)
    steady = GroupRequest("steady", PROMPTS[3], (3, 4), 24)
    longer = GroupRequest("longer", PROMPTS[2], (5, 6), 30)  # into the slots of the short one
    made, order = {}, []

    def on_done(request, rows):
        made[request.key] = [row.token_ids for row in rows]
        order.append(request.key)
        return [longer] if request.key == "short" else []

    generator.run([short, steady], sampling, on_done)
    assert order == ["short", "steady", "longer"]
    assert generator.counters.steps < 24 + 30  # they ran side by side
    for request in (short, steady, longer):
        alone = make().generate(
            [request.prompt_ids],
            len(request.seeds),
            Sampling(max_tokens=request.max_tokens, extra={"ignore_eos": True}),
            [request.seeds],
        )
        assert made[request.key] == [row.token_ids for row in alone[0]]


def test_what_was_reserved_needs_no_other_cache() -> None:
    generator = make(max_rows=8)
    generator.reserve(64, 100, 50)
    kept = generator._cache
    generator.generate([PROMPTS[0]] * 3, 4, Sampling(max_tokens=40), [[1, 2, 3, 4]] * 3)
    assert generator._cache is kept
    assert kept is not None and len(kept.slots.token) == 8  # never more than max_rows


def test_a_request_without_rows_is_handed_over_and_may_bring_others() -> None:
    order = []

    def on_done(request, rows):
        order.append((request.key, len(rows)))
        return [GroupRequest("second", PROMPTS[0], (1,), 2)] if request.key == "none" else []

    make().run([GroupRequest("none", PROMPTS[0], (), 2)], Sampling(), on_done)
    assert order == [("none", 0), ("second", 1)]


def test_a_prompt_is_prefilled_once_for_its_group() -> None:
    generator = make()
    generator.generate([PROMPTS[2]], 8, Sampling(max_tokens=4), [list(range(8))])
    assert generator.counters.prefill_tokens == len(PROMPTS[2]) - 1


def test_where_rows_read_their_prompt_it_stands_while_slots_are_left_filled_and_moved(
    monkeypatch,
) -> None:
    seen = {"shared": 0, "moves": 0}
    steps, move = GroupGenerator.steps, BatchScheduler._move

    def looked(self, cache, rows, n, top_p, longest) -> None:
        slots = cache.slots
        living = slots.alive.nonzero().flatten().tolist()
        assert slots.members.max() < rows
        for slot in living:
            home, shared = int(slots.home[slot]), int(slots.shared[slot])
            assert shared <= int(slots.position[slot])
            assert (slots.members[home] == slot).sum() == 1
            seen["shared"] += home != slot and shared > 0
            for layer in (*cache.k, *cache.v):
                assert torch.allclose(layer[home, :, :shared], layer[slot, :, :shared], atol=1e-5)
        steps(self, cache, rows, n, top_p, longest)

    def counted(self, cache, sources, targets) -> None:
        seen["moves"] += len(sources)
        move(self, cache, sources, targets)

    monkeypatch.setattr(GroupGenerator, "steps", looked)
    monkeypatch.setattr(BatchScheduler, "_move", counted)
    eos = tuple(range(0, 97, 9))  # a row ends after nine tokens on average
    sampler = GroupGenerator(tiny_decoder(), eos_ids=eos, max_rows=12, poll_steps=1)
    prompts = [tuple(range(10 + i, 13 + 2 * i)) for i in range(12)]
    seeds = [[100 * i + j for j in range(5)] for i in range(12)]
    made = sampler.generate(prompts, 5, Sampling(temperature=1.0, max_tokens=40), seeds)
    assert len({len(row.token_ids) for group in made for row in group}) > 10
    assert seen["moves"] > 3 and seen["shared"] > 100
    for i in range(8):  # one group: its last slots may end first, and then nothing moves
        its = range(8 * i, 8 * i + 8)
        sampler.generate(prompts[:1], 8, Sampling(temperature=1.0, max_tokens=40), [its])


def test_a_row_at_the_end_of_the_context_beside_one_with_more_left() -> None:
    prompts = [tuple(range(1, 4)) * 41, tuple(range(5, 15))]  # 123 of 128 tokens
    made = make(max_rows=4).generate(
        prompts, 1, Sampling(max_tokens=40, extra={"ignore_eos": True}), [[1], [2]]
    )
    assert [len(group[0].token_ids) for group in made] == [5, 40]


def test_up_to_eight_rows_read_a_prompt_together(monkeypatch) -> None:
    homes, steps = [], GroupGenerator.steps

    def looked(self, cache, *rest) -> None:
        homes.append((cache.slots.home.tolist(), cache.slots.shared.tolist(), cache.longest_prompt))
        steps(self, cache, *rest)

    monkeypatch.setattr(GroupGenerator, "steps", looked)
    sampler = make(max_rows=16)
    sampler.generate([(5, 6, 7), (8,)], 10, Sampling(max_tokens=1), [range(10), range(10, 20)])
    ten, six = [0] * 8 + [8] * 2, [10] * 6
    assert homes[0] == (ten + six, [2] * 10 + [0] * 6, 2)
    assert homes[1][1:] == ([0] * 16, 0)  # the rest of the second group
    sampler = make(max_rows=16, fixed_rows=True)
    sampler.generate([(5, 6, 7)], 2, Sampling(max_tokens=1), [range(2)])
    assert homes[2][2] == 0  # no neighbour's prompt may change how one is read


def test_long_prompts_are_read_in_parts_by_some_five_hundred_programs() -> None:
    cache = Cache.empty(tiny_decoder(), 1, 64, 1, 1)  # two KV heads
    cache.longest_prompt = 255
    assert [cache.prompt_parts(rows) for rows in (1, 512)] == [0, 0]
    cache.longest_prompt = 256
    found = [cache.prompt_parts(rows) for rows in (1, 64, 128, 256, 512, 1024)]
    assert found == [16, 16, 16, 8, 4, 2]


def test_first_tokens_follow_the_softmax() -> None:
    generator = make(max_rows=1024)
    n = 4000
    made = generator.generate([PROMPTS[0]], n, Sampling(max_tokens=1), [list(range(n))])
    counts = np.bincount([row.token_ids[0] for row in made[0]], minlength=64)
    row = Row(0, PROMPTS[0], (5,))
    packed = pack([row])
    hidden = generator.decoder(packed)[packed.head_D]
    share = (hidden @ generator.decoder.head_weight.t()).softmax(-1)[0].detach().double().numpy()
    expected = n * share / share.sum()
    big = expected >= 5
    assert big.sum() > 3
    small = expected[~big].sum()
    assert abs(counts[~big].sum() - small) < 5 * small**0.5 + 5
    scaled = expected[big] * counts[big].sum() / expected[big].sum()
    assert stats.chisquare(counts[big], scaled).pvalue > 1e-3


def test_a_draw_at_the_edge_of_a_block_is_never_a_token_without_mass() -> None:
    # the mass before the second block rounds to more than what the first block cumulates to
    logits = torch.full((1, 1024), -torch.inf)
    for token, value in ((1, -19.648530960083008), (300, 0.0), (301, 1.183720588684082)):
        logits[0, token] = value
    logits[0, 600] = -22.52713966369629
    uniform = torch.tensor([6_183_987 * 2.0**-53], dtype=torch.float64)
    token, logp = pick(logits, uniform, torch.ones(1))
    assert int(token) == 300
    assert torch.allclose(logp, logits[0].log_softmax(-1)[300])


def test_picked_tokens_follow_temperature_and_nucleus() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    uniform = torch.from_numpy(uniforms(range(20_000), 0, 1)[:, 0])
    token, logp = pick(logits, uniform, torch.full((20_000,), 0.5), 0.8)
    share = (logits[0].double() * 0.5).softmax(-1)
    kept = share[:3] / share[:3].sum()  # 0.455 + 0.276 + 0.167 passes 0.8
    counts = np.bincount(token.numpy(), minlength=4)
    assert counts[3] == 0
    expected = kept.double().numpy()
    scaled = expected * (counts[:3].sum() / expected.sum())  # equal sums, as chisquare asks
    assert stats.chisquare(counts[:3], scaled).pvalue > 1e-3
    assert torch.equal(logp, logits[0].log_softmax(-1)[token].float()) or torch.allclose(
        logp, logits[0].log_softmax(-1)[token], atol=1e-6
    )


def test_uniform_numbers_are_uniform_and_uncorrelated_between_seeds() -> None:
    table = uniforms(range(200), 0, 100)
    assert stats.kstest(table.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def test_sync_changes_what_is_sampled_next() -> None:
    other = tiny_hf(seed=5)
    generator = make()
    before = generator.generate([PROMPTS[0]], 1, Sampling(max_tokens=8), [[3]])
    generator.sync(dict(other.named_parameters()))
    after = generator.generate([PROMPTS[0]], 1, Sampling(max_tokens=8), [[3]])
    fresh = GroupGenerator(decoder_from_hf(other), eos_ids=(2,))
    assert after == fresh.generate([PROMPTS[0]], 1, Sampling(max_tokens=8), [[3]])
    assert after != before


def test_an_unsupported_family_gives_no_generator() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16)
    assert make_generator(transformers.GPT2LMHeadModel(config), tokenizer=object()) is None
