"""ValidRequest: what a client asked for, checked once. Nothing after parsing checks these values again."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One request: some prompts, n choices of each. Choice j of prompt i has index i * n + j."""

    # What to continue: messages (chat) or prompts (completion)
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] | None = None
    named: str = ""  # the body's field that the prompt came in; empty: messages or prompt
    template_arguments: dict[str, Any] | None = None  # extra variables of the chat template
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the last message's text
    add_special_tokens: bool = True
    truncate_prompt_tokens: int = 0  # keep the last so many prompt tokens; -1: as many as fit; 0: refuse what does not fit

    # How to sample
    n: int = 1
    seed: int | None = None  # None: a random one
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()

    # When to end
    max_tokens: int | None = None  # None: as many as fit, or default_max_tokens where fewer
    default_max_tokens: int = 0  # 0: no such default
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    # What to answer
    logprobs: int = -1  # alternatives per generated token; -1: no log-probabilities
    prompt_logprobs: int = -1  # alternatives per prompt token, as a field of its own; -1: none
    echo: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # print tokens of log-probabilities as "token_id:7"
    stream: bool = False
    resumable: bool = False  # another gateway may go on with the stream
    include_usage: bool = False
    continuous_usage: bool = False

    # Where it stands in the queue
    priority: int = 0
    deadline_s: float = 0.0  # seconds from arrival; 0: none

    @property
    def prompt_field(self) -> str:
        """What errors about the prompt call it."""
        return self.named or ("messages" if self.messages is not None else "prompt")

    @property
    def score_width(self) -> int:
        """Alternatives wanted per prompt token; -1: the prompt is not scored."""
        return max(self.prompt_logprobs, self.logprobs if self.echo else -1)
