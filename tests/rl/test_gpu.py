"""CUDA kernels, graphs and flash attention over shared prompts against the dense float road."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rl.test_trainer import fingerprint, make
from tests.rl.tiny import big_hf, big_parts, random_rows, tiny_config, tiny_hf
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.requests import GroupRequest
from tfgrpo.rl.model.attention import attend, attend_back, attend_kept
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rl.model.packing import pack
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW
from tfgrpo.rl.optim.master_weights import FullWeights
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate, score_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(("heads", "kv"), [(9, 3), (14, 2), (4, 4)])
def test_flash_form_equals_dense_form_in_value_and_gradient(heads, kv) -> None:
    rows = random_rows(7, 5, seed=3)
    rows = [replace(r, suffix_ids=r.suffix_ids * 23, prompt_ids=r.prompt_ids * 9) for r in rows]
    packed = pack(rows, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(n):
        x = torch.randn(packed.n_tokens, n, 64, device="cuda", generator=generator)
        return x.bfloat16()

    q, k, v = draw(heads), draw(kv), draw(kv)
    weight = draw(heads)
    out, told = attend_kept(q, k, v, packed)
    got = attend_back(weight, (q, k, v), out, told, packed)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attend(*wide, packed)
    want = torch.autograd.grad((expected * weight.double()).sum(), wide)
    assert relative(out, expected) < 1e-2
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1.5e-2


@pytest.mark.parametrize(
    ("kind", "heads", "kv"), [("llama", 6, 2), ("qwen2", 14, 2), ("qwen3", 6, 2), ("llama", 12, 4)]
)
@pytest.mark.parametrize("longest", [33, 380])
def test_sampled_logprobs_equal_a_packed_rescore(kind, heads, kv, longest) -> None:
    model = big_hf(kind, num_attention_heads=heads, num_key_value_heads=kv)
    decoder = decoder_from_hf(model)
    generator = GroupGenerator(decoder, eos_ids=(2,), max_rows=64)
    prompts = [tuple(range(10, 10 + n)) for n in (1, 5, 70, longest)]
    seeds = [[100 * i + j for j in range(8)] for i in range(4)]
    made = generator.generate(prompts, 8, Sampling(max_tokens=90), seeds)
    from tfgrpo.rl.model.packing import Row

    rows = [
        Row(8 * i + j, prompts[i], row.token_ids)
        for i, group in enumerate(made)
        for j, row in enumerate(group)
    ]
    scored = score_rows(decoder, rows, temperature=1.0, max_tokens=4096)
    flat = [r for g in made for r in g]
    delta = np.concatenate([np.subtract(r.logprobs, scored[i]) for i, r in enumerate(flat)])
    assert np.abs(delta).mean() < 0.03
    assert np.abs(delta).max() < 0.5
    assert len({r.token_ids for r in flat}) == 32


def test_greedy_follows_hf_greedy_until_the_first_near_tie() -> None:
    model = big_hf()
    generator = GroupGenerator(decoder_from_hf(model, share=False), eos_ids=(2,))
    prompt = tuple(range(10, 40))
    (row,) = generator.generate([prompt], 1, Sampling(temperature=0.0, max_tokens=40), [[0]])[0]
    ids = torch.tensor([[*prompt, *row.token_ids]], device="cuda")
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(-1).values
    chosen = logits.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
    assert (best - chosen).max() < 0.15


def test_graph_and_eager_steps_draw_the_same_tokens() -> None:
    decoder = decoder_from_hf(big_hf())
    prompts = [tuple(range(10, 10 + n)) for n in (4, 20)]
    seeds = [[1, 2, 3], [4, 5, 6]]
    made = [
        GroupGenerator(decoder, eos_ids=(2,), graphs=graphs).generate(
            prompts, 3, Sampling(max_tokens=50), seeds
        )
        for graphs in (True, False)
    ]
    assert made[0] == made[1]


def test_a_fixed_row_count_makes_samples_independent_of_the_batch() -> None:
    decoder = decoder_from_hf(big_hf())
    options = {"eos_ids": (2,), "max_rows": 32, "fixed_rows": True}
    prompts = [tuple(range(10, 10 + n)) for n in (4, 20, 31)]
    seeds = [[10 * i + j for j in range(16)] for i in range(3)]
    sampling = Sampling(max_tokens=60)
    prompts[2] += tuple(range(50, 400))  # long enough to be read in another way elsewhere
    crowd = GroupGenerator(decoder, **options).generate(prompts, 16, sampling, seeds)
    alone = GroupGenerator(decoder, **options).generate([prompts[1]], 1, sampling, [[seeds[1][7]]])
    assert alone[0][0].token_ids == crowd[1][7].token_ids


class Arrivals:
    """A feed whose third look brings a request and after whose fifth nobody waits for one."""

    def __init__(self, late: GroupRequest, lost: str) -> None:
        self._late, self._lost, self._looks = late, lost, 0

    def more(self, free: int) -> list[GroupRequest]:
        self._looks += 1
        return [self._late] if self._looks == 3 and free else []

    def is_cancelled(self, request: GroupRequest, made: int) -> bool:
        return request.key == self._lost and self._looks > 5


def test_rows_join_leave_and_are_cancelled_while_others_decode() -> None:
    decoder = decoder_from_hf(big_hf())
    options = {"eos_ids": (2,), "max_rows": 32, "fixed_rows": True}
    sampling = Sampling(max_tokens=80, extra={"ignore_eos": True})
    asked = [
        GroupRequest(key, tuple(range(10, 10 + n)), (seed,), 80)
        for key, n, seed in (("early", 12, 1), ("lost", 30, 2), ("late", 41, 3))
    ]
    made: dict[str, tuple[int, ...]] = {}

    def keep(request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        made[request.key] = rows[0].token_ids
        return []

    crowd = GroupGenerator(decoder, **options)
    counters = crowd.run(asked[:2], sampling, keep, Arrivals(asked[2], "lost"))
    assert {k: len(v) for k, v in made.items()} == {"early": 80, "late": 80, "lost": 48}
    assert counters.steps < 160
    for request in asked:
        (alone,) = GroupGenerator(decoder, **options).generate(
            [request.prompt_ids], 1, sampling, [list(request.seeds)]
        )[0]
        assert made[request.key] == alone.token_ids[: len(made[request.key])]


def test_first_tokens_follow_the_softmax_on_the_gpu() -> None:
    from scipy import stats

    decoder = decoder_from_hf(big_hf())
    generator = GroupGenerator(decoder, eos_ids=(), max_rows=1024)
    n, prompt = 20_000, (11, 12, 13)
    made = generator.generate([prompt], n, Sampling(max_tokens=1), [list(range(n))])
    counts = np.bincount([row.token_ids[0] for row in made[0]], minlength=5000)
    from tfgrpo.rl.model.packing import Row

    packed = pack([Row(0, prompt, (5,))], device="cuda")
    with torch.no_grad():
        logits = decoder(packed)[packed.head_D] @ decoder.head_weight.t()
    share = logits.float().softmax(-1)[0].double().cpu().numpy()
    big = n * share >= 5
    scaled = share[big] / share[big].sum() * counts[big].sum()
    assert big.sum() > 20
    assert stats.chisquare(counts[big], scaled).pvalue > 1e-3


def test_gpu_gradients_equal_cpu_gradients_within_bfloat16_noise() -> None:
    model = big_hf()
    decoder = decoder_from_hf(model, share=False)
    rows = [
        TrainRow(replace(r, suffix_ids=r.suffix_ids * 5), float(a))
        for r, a in zip(random_rows(6, 4), np.linspace(-1, 1, 24))
    ]
    accumulate(decoder, rows, UpdateSettings(micro_batch_tokens=200))
    exact = decoder_from_hf(model.double().cpu(), share=False)
    accumulate(exact, rows, UpdateSettings())
    wanted = dict(exact.named_parameters())
    for name, parameter in decoder.named_parameters():
        assert relative(parameter.grad.cpu(), wanted[name].grad) < 0.06, name


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_optimiser_moves_weights_as_on_the_cpu(moments) -> None:
    def trained(device: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = torch.nn.Linear(700, 300).to(torch.bfloat16).to(device)
        optimiser = AdamW(FullWeights(module), AdamSettings(moments=moments, weight_decay=0.1))
        draw = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(64, 700, generator=draw).bfloat16().to(device)
            for parameter, n in zip(module.parameters(), (210_000, 300), strict=True):
                gradient = torch.randn(n, generator=draw).bfloat16().to(device)
                (parameter.flatten() * gradient).sum().backward()
            optimiser.step(1e-3)
        assert module(x).isfinite().all()
        return {n: t.cpu() for n, t in optimiser.state()}

    wanted, got = trained("cpu"), trained("cuda")
    for name, tensor in wanted.items():
        assert relative(got[name], tensor) < (1e-3 if moments == torch.bfloat16 else 1e-5), name
        # a rounded moment may fall to the other side where float32 differs in its last bits
        size = tensor.float().abs()
        away = (got[name].float() - tensor.float()).abs() > 1e-4 * size + 1e-6 * size.mean()
        assert away.float().mean() < 0.01, name


def test_resume_on_the_gpu_is_bit_equal(tmp_path) -> None:
    def config(name):
        return tiny_config(
            tmp_path / name,
            rollout={"max_tokens": 40, "max_rows": 16},
            optimiser={"lr": 1e-4, "micro_batch_tokens": 256},
        )

    whole = make(config("whole"), parts=big_parts())
    whole.train()
    first = make(config("cut"), parts=big_parts())
    while first.step_number < 2:
        first.step()
    first.save()
    second = make(config("cut"), parts=big_parts())
    second.train()
    assert fingerprint(second) == fingerprint(whole)
    assert second.step().groups == whole.step().groups
    assert tiny_hf().config.num_hidden_layers == 2
