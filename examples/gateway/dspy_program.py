"""A DSPy program over the gateway, rated as a session.

    python dspy_program.py http://127.0.0.1:8080 MODEL

The session stands in the base URL, which is all that the agent is told of the gateway.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid

import dspy

URL, MODEL = sys.argv[1], sys.argv[2]
SESSION = f"dspy-program-{uuid.uuid4().hex[:12]}"
BASE_URL = f"{URL}/s/{SESSION}/v1"


def rate(value: float) -> None:
    """Tell the gateway how the whole session went."""
    body = json.dumps({"session_id": SESSION, "value": value}).encode()
    request = urllib.request.Request(
        f"{URL}/v1/feedback", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        print("feedback:", response.status)


lm = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key="none", cache=False)
with dspy.context(lm=lm):
    print("answer:", dspy.Predict("question -> answer")(question="What is 2 + 2?").answer)
rate(1.0)
