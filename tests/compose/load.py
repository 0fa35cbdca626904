"""Streams through the gateways while something happens to the stack: python load.py SECONDS URL... Exit 0: no stream noticed.

Every stream asks greedily for a long answer; the text must be the one that an undisturbed stream got, to the last character.
"""

import asyncio
import sys
import time
from dataclasses import dataclass

from openai import AsyncOpenAI, OpenAIError

STREAMS = 6
TOKENS = 96
PROMPTS = (
    "Write a long story about a lighthouse keeper who finds a map.",
    "Explain in detail how bread is made, step by step.",
    "Describe a walk through an old city in the rain.",
)


@dataclass
class Seen:
    streams: int = 0
    tokens: int = 0
    longest_gap_s: float = 0.0


async def answer(client: AsyncOpenAI, model: str, prompt: str, seen: Seen) -> str:
    text, last = "", time.monotonic()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    finished = False
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finished = finished or choice.finish_reason == "length"
        now = time.monotonic()
        seen.longest_gap_s, last = max(seen.longest_gap_s, now - last), now
        seen.tokens += 1
    if not finished:
        raise RuntimeError(f"a stream ended after {len(text)} characters without a finish reason")
    seen.streams += 1
    return text


async def keep_asking(client: AsyncOpenAI, model: str, number: int, expected: dict[str, str], until: float, seen: Seen) -> None:
    while time.monotonic() < until:
        prompt = PROMPTS[number % len(PROMPTS)]
        number += 1
        text = await answer(client, model, prompt, seen)
        if text != expected[prompt]:
            pairs = enumerate(zip(text, expected[prompt], strict=False))
            start = max(0, next((at for at, (ours, theirs) in pairs if ours != theirs), len(text)) - 20)
            raise RuntimeError(f"undisturbed {expected[prompt][start : start + 40]!r}, now {text[start : start + 40]!r}")


async def main(seconds: float, urls: list[str]) -> int:
    clients = [AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) for url in urls]
    model = (await clients[0].models.list()).data[0].id
    expected = {prompt: await answer(clients[0], model, prompt, Seen()) for prompt in PROMPTS}
    print("loaded", flush=True)
    seen, until = Seen(), time.monotonic() + seconds
    work = [keep_asking(clients[number % len(clients)], model, number, expected, until, seen) for number in range(STREAMS)]
    results = await asyncio.gather(*work, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, OpenAIError | RuntimeError):
            raise error
        print(f"FAILED: {type(error).__name__}: {error}")
    print(f"{seen.streams} streams, {seen.tokens} chunks, longest gap {seen.longest_gap_s:.1f} s, {len(errors)} failed")
    return 1 if errors or not seen.streams else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(float(sys.argv[1]), sys.argv[2:])))
