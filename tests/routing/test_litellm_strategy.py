"""The router inside litellm's own Router, with mocked replies."""

from __future__ import annotations

import importlib.util

import pytest

from tests.routing.test_router import EASY, HARD, history
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.records import ModelInfo, SuccessCount
from tfgrpo.routing.router import Router
from tfgrpo.routing.rules import TradeOff
from tfgrpo.runtime.embedders import HashedNgrams

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is absent"),
    pytest.mark.filterwarnings("ignore"),
]


async def test_litellm_sends_each_prompt_to_the_model_the_router_chose(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    from tfgrpo.routing.litellm_strategy import install

    names = {"cheap": "openai/small", "dear": "openai/large"}
    rows = [
        SuccessCount(o.prompt, names[o.model], o.successes, output_tokens=50) for o in history()
    ]
    router = Router(
        ValueModel(HashedNgrams(128)),
        [ModelInfo("openai/small", "", 0.1, 0.2), ModelInfo("openai/large", "", 10.0, 20.0)],
        rows,
        rule=TradeOff(100.0),
        fallback="openai/large",
    )
    host = litellm.Router(
        model_list=[
            {
                "model_name": "auto",
                "litellm_params": {"model": name, "api_key": "none", "mock_response": name},
            }
            for name in names.values()
        ]
    )
    install(host, router)

    async def ask(prompt):
        reply = await host.acompletion("auto", messages=[{"role": "user", "content": prompt}])
        return reply.choices[0].message.content

    assert await ask(EASY.format(7)) == "openai/small"
    assert await ask(HARD.format(7)) == "openai/large"
