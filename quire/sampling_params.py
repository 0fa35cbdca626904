"""SamplingParams: how to sample, under vLLM's names, and the request body of the HTTP API that means the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Defaults are vLLM's. None leaves a value to the model's generation_config.json, or to plain sampling."""

    n: int = 1  # answers to each prompt
    temperature: float | None = 1.0  # 0: greedy
    top_p: float | None = 1.0
    top_k: int | None = 0  # 0 or -1: all tokens
    min_p: float | None = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    seed: int | None = None  # None: a random one
    max_tokens: int | None = 16  # None: as many as fit
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives per generated token
    prompt_logprobs: int | None = None  # alternatives per prompt token
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def body(self, *, chat: bool) -> dict[str, Any]:
        """Fields of a chat or completion request. Whatever is wrong is found where every request's body is checked."""
        body = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if body[name] is not None and not isinstance(body[name], str):
                body[name] = list(body[name]) or None
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if chat and self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return {name: value for name, value in body.items() if value is not None}
