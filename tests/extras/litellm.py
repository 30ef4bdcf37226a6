"""`litellm`: a call goes through litellm to a server of ours."""

import asyncio
import os

os.environ["KEY"] = "key-for-the-script"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from tfgrpo import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Request
from tfgrpo.testing import FaultServer


async def main() -> None:
    with FaultServer(draw=lambda call, seed: "an answer") as server:
        lm = open_lm("litellm:openai/some-model", api_base=server.base_url, api_key_env="KEY")
        (reply,) = await lm.complete(Request((Message("user", "hello"),)), 1, [0])
        await lm.aclose()
        assert server.call_count == 1
    assert reply.text == "an answer", reply


asyncio.run(main())
