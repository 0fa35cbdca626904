"""What a request is checked against: every limit of the API in one table, and the facts of the served model."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Sampling where the request says nothing: the model's generation_config.json, else plain sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    # The served model
    model_name: str
    vocab_size: int  # width of the logits: ids below it may be prompted, biased and sampled
    defaults: Defaults = field(default_factory=Defaults)
    has_chat_template: bool = True

    # Counts, checked before anything of that size is built
    max_depth: int = 32  # nesting of JSON containers
    max_n: int = 512  # choices of one prompt
    max_prompts: int = 1024  # prompts of one request
    max_sequences: int = 1024  # prompts times n
    max_resumable: int = 16  # choices of one resumable stream: each is counted in every event id
    max_messages: int = 8192
    max_parts: int = 1024  # content parts or tool calls of one message
    max_prompt_ids: int = 4 * 2**20  # ids of all prompts of one request
    max_logprobs: int = 20  # alternatives per token
    max_logprob_entries: int = 4 * 2**20  # tokens times (alternatives + 1) of one whole answer; a stream keeps none
    max_stops: int = 64  # stop strings
    max_stop_chars: int = 1024  # of one stop string
    max_all_stop_chars: int = 4096  # of all of them
    max_stop_ids: int = 1024
    max_bad_words: int = 128
    max_bad_word_chars: int = 256  # of one of them
    max_bias: int = 1024  # entries of logit_bias
    max_allowed_ids: int = 4096
    max_tokens: int = 2**31 - 1  # largest number a token count may say; the model's length is checked with the prompt
    max_string_chars: int = 4096  # of a short string such as a name
    max_rendered_chars: int = 16 * 2**20  # of a rendered chat template
