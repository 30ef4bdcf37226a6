"""An environment of `verifiers` over the gateway: its rewards become feedback, its rollouts groups.

    python verifiers_environment.py http://127.0.0.1:8080 MODEL

The route needs `capture = true` and `groups = { task_identity = "messages" }`: it sends no ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import Any

import verifiers as vf
from datasets import Dataset

URL, MODEL = sys.argv[1], sys.argv[2]
os.environ["GATEWAY_KEY"] = "none"
rows = Dataset.from_list([{"question": f"{i} + {4 - i}?", "answer": "4"} for i in range(3)])


def correct(completion: Any, answer: str, state: Any) -> float:
    """Return whether an answer is right, and tell the gateway."""
    reward = float(completion[-1]["content"].strip() == answer)
    record = {"response_id": state["trajectory"][-1]["response"].id, "value": reward,
              "source": "verifier:environment"}  # fmt: skip
    request = urllib.request.Request(
        f"{URL}/v1/feedback", json.dumps(record).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        print("feedback:", response.status)
    return reward


environment = vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[correct]))
client = vf.ClientConfig(
    client_type="openai_chat_completions", api_base_url=f"{URL}/v1", api_key_var="GATEWAY_KEY"
)
found = asyncio.run(
    environment.evaluate(client, MODEL, num_examples=3, rollouts_per_example=2, max_concurrent=1)
)
print("rewards:", [o["reward"] for o in found["outputs"]])
