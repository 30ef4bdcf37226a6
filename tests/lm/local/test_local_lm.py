"""The decode loop and the local backend on a two-layer random model: exact, in float32."""

import asyncio
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.patience import PATIENCE_S  # noqa: E402
from tfgrpo.errors import ConfigError, ProviderError  # noqa: E402
from tfgrpo.lm.local.decode_loop import HFGenerator  # noqa: E402
from tfgrpo.lm.local.loading import LocalModel  # noqa: E402
from tfgrpo.lm.local.local_lm import LoadedWeights, LocalLM  # noqa: E402
from tfgrpo.messages import Message, ToolCall  # noqa: E402
from tfgrpo.protocols import Limits, Request, Sampling, ToolSpec  # noqa: E402
from tfgrpo.testing import check_generator, check_lm  # noqa: E402

EOS = 1
LETTERS = '\x00\x01 abcdefghijklmnopqrstuvwxyz<>|/_{}":,.0123456789?\n'


class LetterTokenizer:
    """One token a character; a chat template in two lines."""

    chat_template = "letters"
    all_special_ids = (0, EOS)
    eos_token_id = EOS

    def encode(self, text, add_special_tokens=True):
        return [max(0, LETTERS.find(c.lower())) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(LETTERS[i] for i in ids if not (skip_special_tokens and i < 2))

    def apply_chat_template(self, rows, *, tools, tokenize, add_generation_prompt, **options):
        return "".join(f"{r['role'][0]}:{r['content']}\n" for r in rows) + "a:"


@pytest.fixture(scope="module")
def loaded():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _tiny_model()
    torch.set_num_threads(threads)


def _tiny_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=EOS, bos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return LocalModel(model, LetterTokenizer(), "tiny", "float32", 256, (EOS,))


@pytest.fixture
def lm(loaded):
    return LocalLM("tiny", loaded=LoadedWeights(loaded), max_rows=8, max_tokens=24)


def generator(loaded, **options):
    options = {"eos_ids": (EOS,), "decode": loaded.tokenizer.decode, "max_rows": 8} | options
    return HFGenerator(loaded.model, **options)


PROMPTS = [(5, 6, 7), (9,), tuple(range(3, 43)), (20, 21, 22, 23, 24, 25)]


def slow(loaded, prompt, seed, limit, temperature):
    """One row, no cache, no batch: the reference."""
    from tfgrpo.lm.local.counter_rng import draw_tokens, uniforms

    ids, out, logps = list(prompt), [], []
    for u in uniforms(seed, limit):
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([ids])).logits[:, -1]
        token, logp, _ = draw_tokens(
            logits, torch.tensor([temperature]), torch.tensor([1.0]),
            torch.tensor([u], dtype=torch.float64),
        )  # fmt: skip
        out.append(token.item())
        logps.append(logp.item())
        ids.append(out[-1])
        if out[-1] == EOS:
            break
    return tuple(out), logps


@pytest.fixture(scope="module")
def reference(loaded):
    return {(p, s): slow(loaded, prompt, 10 * p + s, 50, 0.8)
            for p, prompt in enumerate(PROMPTS) for s in range(3)}  # fmt: skip


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_batched_rows_equal_a_loop_without_cache(loaded, reference, max_rows):
    sampling = Sampling(temperature=0.8, max_tokens=50)
    made = generator(loaded, max_rows=max_rows).generate(
        PROMPTS, 3, sampling, [[10 * p + g for g in range(3)] for p in range(4)]
    )
    for p in range(len(PROMPTS)):
        for g in range(3):
            ids, logps = reference[p, g]
            assert made[p][g].token_ids == ids, (p, g)
            assert made[p][g].logprobs == pytest.approx(logps, abs=1e-3)
            assert made[p][g].finish == ("stop" if ids[-1] == EOS else "length")


INSTRUCTIONS = tuple(range(3, 33))
SHARING = [
    (*INSTRUCTIONS, 7),
    (*INSTRUCTIONS, *range(40, 20, -1)),
    (*INSTRUCTIONS[:25], 40, 41, 42),
    INSTRUCTIONS,
    (*INSTRUCTIONS, 9, 9, 9),
]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 64])
def test_prompts_that_begin_alike_are_read_on_behind_their_common_beginning(loaded, max_rows):
    read = []
    hook = loaded.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    sampling = Sampling(temperature=0.8, max_tokens=12)
    made = generator(loaded, max_rows=max_rows).generate(
        SHARING, 2, sampling, [[10 * p, 10 * p + 1] for p in range(len(SHARING))]
    )
    hook.remove()
    for p, prompt in enumerate(SHARING):
        for g in range(2):
            ids, logps = slow(loaded, prompt, 10 * p + g, 12, 0.8)
            assert made[p][g].token_ids == ids, (p, g)
            assert made[p][g].logprobs == pytest.approx(logps, abs=1e-3)
    if max_rows == 64:  # one join: the beginning alone, then the rests together
        assert read[:2] == [(1, 25), (len(SHARING), 25)]


def test_what_others_leave_free_is_asked_before_each_step(loaded):
    before = torch.get_num_threads()
    counts = iter([1, 2, 1, 2])
    seen = []
    hook = loaded.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        own = generator(loaded, threads=lambda: next(counts))
        own.generate([(5, 6)], 1, Sampling(temperature=0, max_tokens=3, extra={}), [[0]])
    finally:
        hook.remove()
        torch.set_num_threads(before)
    assert seen == [1, 1, 2]  # the prompt and the first step, then the second


def test_greedy_rows_equal_transformers_generate(loaded):
    made = generator(loaded).generate(PROMPTS, 1, Sampling(temperature=0, max_tokens=20), [[0]] * 4)
    for prompt, (row,) in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20
            )
        assert tuple(out[0, len(prompt) :].tolist()) == row.token_ids


def test_models_without_grouped_attention_decode_alike(loaded):
    config = transformers.GPT2Config(
        vocab_size=len(LETTERS), n_embd=32, n_layer=2, n_head=4, n_positions=128,
        eos_token_id=EOS, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    other = LocalModel(
        transformers.GPT2LMHeadModel(config).eval(), loaded.tokenizer, "g", "float32", 128, (EOS,)
    )
    with torch.no_grad():
        other.model.transformer.wte.weight.mul_(20)
    made = generator(other).generate(PROMPTS, 2, Sampling(max_tokens=15), [[1, 2]] * 4)
    for prompt, rows in zip(PROMPTS, made, strict=True):
        assert [r.token_ids for r in rows] == [slow(other, prompt, s, 15, 1.0)[0] for s in (1, 2)]


def test_new_weights_are_used_by_the_next_generate(loaded):
    own = generator(loaded)
    name = "lm_head.weight"
    old = dict(loaded.model.named_parameters())[name].detach().clone()
    sampling = Sampling(temperature=0, max_tokens=3)
    before = own.generate([(5,)], 1, sampling, [[0]])
    own.sync({name: old.roll(1, 0)})
    after = own.generate([(5,)], 1, sampling, [[0]])
    own.sync({name: old})
    again = own.generate([(5,)], 1, sampling, [[0]])
    assert before == again != after


async def test_the_contract_holds(lm):
    await check_lm(lm, is_deterministic=True)


async def test_a_reply_does_not_depend_on_what_else_is_asked(lm):
    asks = [
        Request((Message("user", text),), sampling=Sampling(temperature=t, max_tokens=m))
        for text, t, m in (("hi", 1.0, 20), ("a longer question here", 0.5, 9), ("x", 0.0, 24))
    ]
    alone = [(await lm.complete(r, 1, [3]))[0].text for r in asks]
    many = await asyncio.gather(*(lm.complete(r, 2, [4, 3]) for r in asks * 7))
    assert [m[1].text for m in many] == alone * 7


async def test_finish_usage_and_ids(lm):
    request = Request((Message("user", "hi"),), sampling=Sampling(max_tokens=5, logprobs=True,
                                                                  top_logprobs=2))  # fmt: skip
    replies = await lm.complete(request, 3, [1, 2, 3])
    for reply in replies:
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.top_logprobs)
        assert reply.finish == ("stop" if reply.token_ids[-1] == EOS else "length")
        assert reply.usage.completion_tokens == len(reply.token_ids)
    assert sum(r.usage.calls for r in replies) == 1
    assert sum(r.usage.prompt_tokens for r in replies) == len(replies[0].prompt_token_ids)


async def test_a_stop_string_cuts_text_and_ids(lm):
    request = Request((Message("user", "hi"),), sampling=Sampling(max_tokens=24))
    (whole,) = await lm.complete(request, 1, [5])
    stop = whole.text[4:6]
    (cut,) = await lm.complete(request.with_sampling(stop=(stop,)), 1, [5])
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.finish == "stop" and cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


async def test_streamed_pieces_join_to_the_reply(lm):
    request = Request((Message("user", "hi"),), sampling=Sampling(max_tokens=12))
    (whole,) = await lm.complete(request, 1, [5])
    pieces = [p async for p in lm.stream(request, 5)]
    assert "".join(p for p in pieces if isinstance(p, str)) == whole.text == pieces[-1].text


async def test_a_prompt_that_fills_the_context_is_typed(lm):
    request = Request((Message("user", "x" * 300),))
    with pytest.raises(ProviderError, match="256") as caught:
        await lm.complete(request, 1, [0])
    assert caught.value.kind == "context_too_long"


async def test_a_deadline_and_a_cancelled_call_free_their_rows(lm):
    slow_ask = Request((Message("user", "hi"),), sampling=Sampling(max_tokens=200),
                       limits=Limits(timeout_s=0.001))  # fmt: skip
    with pytest.raises(ProviderError) as caught:
        await lm.complete(slow_ask, 4, [1, 2, 3, 4])
    assert caught.value.kind == "timeout"
    (reply,) = await lm.complete(Request((Message("user", "hi"),)), 1, [1])
    assert reply.usage.calls == 1


async def test_logits_that_are_not_finite_are_a_bad_reply(loaded, lm):
    weight = dict(loaded.model.named_parameters())["lm_head.weight"]
    old = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(ProviderError, match="not finite") as caught:
            await lm.complete(Request((Message("user", "hi"),)), 1, [1])
    finally:
        with torch.no_grad():
            weight.copy_(old)
    assert caught.value.kind == "bad_reply"
    assert (await lm.complete(Request((Message("user", "hi"),)), 1, [1]))[0].usage.calls == 1


async def test_tools_without_a_template_stand_in_the_prompt_and_calls_are_read(lm):
    await lm.complete(Request((Message("user", "hi"),)), 1, [0])
    chat = lm._format
    request = Request(
        (Message("user", "hi"),), tools=(ToolSpec("area", "of a shape", {"type": "object"}),)
    )
    prompt = chat.text(chat.prompt_ids(request))
    assert "area" in prompt and "tool_call" in prompt
    text, calls = chat.tool_calls(
        'so <tool_call>{"name": "area", "arguments": {"base": 1}}</tool_call>'
    )
    assert (text, calls) == ("so", (ToolCall("call_0", "area", '{"base": 1}'),))
    assert chat.tool_calls("<tool_call>{broken}</tool_call>")[1] == ()


async def test_a_closed_model_refuses_calls(lm):
    await lm.aclose()
    with pytest.raises(ProviderError, match="closed"):
        await lm.complete(Request((Message("user", "hi"),)), 1, [0])


def test_wrong_settings_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        LocalLM(str(tmp_path))
    with pytest.raises(ConfigError, match="max_rows"):
        LocalLM("smollm2-135m", max_rows=0)


# ---- a generator of the trainer's kind behind the queue ------------------------------------------


@pytest.fixture
def grouped(loaded):
    """The group generator as the engine; rows join and leave while it decodes."""
    from tfgrpo.rl.generation.generator import GroupGenerator, decoder_from_hf

    def make(max_rows):
        engine = GroupGenerator(
            decoder_from_hf(loaded.model), eos_ids=(EOS,), max_rows=max_rows, poll_steps=4
        )
        weights = LoadedWeights(loaded, engine)
        lm = LocalLM("tiny", loaded=weights, max_rows=max_rows, max_tokens=24)
        return lm, engine

    return make


def ask(max_tokens, temperature=1.0, timeout_s=60.0):
    extra = {"ignore_eos": True}
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, extra=extra)
    return Request((Message("user", "hi"),), sampling=sampling, limits=Limits(timeout_s=timeout_s))


async def finished_in_order(lm, requests):
    """Ask at the same moment, in order; return the numbers of the requests as they ended."""
    await lm.complete(ask(1), 1, [99])  # what is made at the first call would mix up the order
    ended = []

    async def one(number, request):
        (reply,) = await lm.complete(request, 1, [number])
        assert len(reply.token_ids) == request.sampling.max_tokens
        ended.append(number)

    await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)))
    return ended


async def test_the_group_generator_answers_as_the_contract_says(grouped):
    lm, _ = grouped(8)
    await check_lm(lm)


async def test_a_late_row_joins_the_batch_that_is_decoded(grouped):
    lm, engine = grouped(8)
    long = asyncio.create_task(lm.complete(ask(160), 1, [0]))
    while not engine.counters.steps:
        await asyncio.sleep(0.001)
    (late,) = await lm.complete(ask(160), 1, [1])  # of the same sampling
    assert len(late.token_ids) == 160 and (await long)[0].token_ids
    assert engine.counters.new_tokens == 320  # one run served both
    assert engine.counters.steps < 320


async def test_a_cancelled_row_leaves_its_place_to_the_next(grouped):
    lm, engine = grouped(1)
    lost = asyncio.create_task(lm.complete(ask(200), 1, [0]))
    while not engine.counters.steps:
        await asyncio.sleep(0.001)
    lost.cancel()
    (reply,) = await lm.complete(ask(200), 1, [1])
    assert len(reply.token_ids) == 200
    assert engine.counters.steps < 300  # 400 were needed if the first had gone on


async def test_rows_of_another_sampling_are_not_kept_waiting_by_later_ones(grouped):
    lm, _ = grouped(1)
    warm, cold = ask(20), ask(20, temperature=0.0)
    assert await finished_in_order(lm, [warm, cold, warm, warm]) == [0, 1, 2, 3]


async def test_rows_of_one_sampling_share_a_batch_when_they_come_together(grouped):
    lm, engine = grouped(8)
    warm, cold = ask(20), ask(20, temperature=0.0)
    await finished_in_order(lm, [warm, cold, warm, cold, warm])
    assert engine.counters.new_tokens == 40  # the last run served both cold ones


LEFT_OPEN = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.lm.local.test_local_lm import LoadedWeights, LocalLM, _tiny_model, ask

async def main():
    lm = LocalLM("tiny", loaded=LoadedWeights(_tiny_model()))
    await lm.complete(ask(2), 1, [0])
    jobs = [asyncio.ensure_future(lm.complete(ask(200), 1, [i])) for i in range(8)]
    await asyncio.sleep(0.05)
    raise SystemExit(7)

asyncio.run(main())
"""


@pytest.mark.real
def test_a_process_that_ends_while_a_model_decodes_keeps_its_exit_code(pytestconfig):
    script = LEFT_OPEN.format(root=str(pytestconfig.rootpath))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 7, done.stderr[-2000:]


def test_the_generator_keeps_the_contract(loaded):
    check_generator(generator(loaded), [[5, 6, 7], [8, 9]])
