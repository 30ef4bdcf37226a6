"""An Inspect task over the gateway: its scores become feedback, its epochs groups.

    python inspect_task.py http://127.0.0.1:8080 MODEL

The route needs `capture = true` and `groups = { task_identity = "messages" }`: Inspect sends no
ids.
"""

from __future__ import annotations

import json
import sys
import urllib.request

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate

URL, MODEL = sys.argv[1], sys.argv[2]
model = get_model(f"openai-api/gateway/{MODEL}", base_url=f"{URL}/v1", api_key="none",
                  responses_api=False)  # fmt: skip
samples = [Sample(input=f"{i} + {4 - i}?", target="4") for i in range(3)]
task = Task(dataset=samples, solver=generate(), scorer=match())
(log,) = eval(task, model=model, epochs=2, max_connections=1, max_samples=1, log_dir="logs")
if log.status != "success":
    sys.exit(f"the task failed: {log.error}")
for sample in log.samples or []:
    event = next(e for e in sample.events if e.event == "model")
    score = 1.0 if (sample.scores or {})["match"].value == "C" else 0.0
    record = {"response_id": event.call.response["id"], "value": score,
              "source": "verifier:inspect"}  # fmt: skip
    request = urllib.request.Request(
        f"{URL}/v1/feedback", json.dumps(record).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        print("feedback:", response.status)
