"""Every field of the generation APIs: implemented, accepted without effect, or refused. API.md is printed from this table."""

import json
from dataclasses import dataclass
from typing import Any

from gateway import fields
from gateway.fields import Check, boolean, integer, number, one_of, short_string

CHAT, COMPLETION, RESPONSES = "chat", "completion", "responses"
BOTH = (CHAT, COMPLETION)
ALL = (*BOTH, RESPONSES)


@dataclass(frozen=True)
class Field:
    """kind: "implemented" (check gives the value), "no effect" (any value check admits), "refused" (only harmless values)."""

    name: str
    kind: str
    note: str
    check: Check | None = None
    harmless: tuple[Any, ...] = ()
    apis: tuple[str, ...] = ALL


def _does(name: str, check: Check, note: str, *apis: str) -> Field:
    return Field(name, "implemented", note, check=check, apis=apis or ALL)


def _idle(name: str, check: Check, why: str, *apis: str) -> Field:
    return Field(name, "no effect", why, check=check, apis=apis or ALL)


def _not(name: str, *harmless: Any, apis: tuple[str, ...] = ALL, why: str = "not supported") -> Field:
    return Field(name, "refused", why, harmless=harmless, apis=apis)


def _raw(value: Any, path: str, limits: Any) -> Any:
    """Checked by openai.py, together with other fields."""
    return value


def _labels(value: Any, path: str, limits: Any) -> Any:
    for name, label in fields.sized(fields.expect(dict, value, path), path, 64, "entries").items():
        short_string(label, f"{path}.{name}", limits)
    return value


IMPLEMENTED = (
    _does("model", short_string, "the served model's name; absent: that model; any other name is answered 404"),
    _does("messages", _raw, "roles system, developer, user, assistant, tool; content is text or a list of text parts", CHAT),
    _does("prompt", fields.prompt, "text, list of texts, token ids, or list of lists of token ids", COMPLETION),
    _does("max_tokens", integer(0, "max_tokens"), "cap on generated tokens; prompt + cap beyond the model's length is 400. "
          "Absent: as many as fit, in completions at most 16. 0: only with echo or prompt_logprobs", *BOTH),
    _does("max_completion_tokens", integer(0, "max_tokens"), "the newer name of max_tokens; both given must agree", CHAT),
    _does("min_tokens", integer(0, "max_tokens"), "stop ids and stop strings do not end the answer before so many tokens"),
    _does("n", integer(1, "max_n"), "choices per prompt, each with its own random stream", *BOTH),
    _does("seed", integer(-(2**63), 2**64 - 1), "same seed, same request, same tokens; absent: a random seed"),
    _does("temperature", number(0, 2), "0: greedy; below 1e-5 counts as 0"),
    _does("top_p", number(0, 1, above=True), "nucleus sampling"),
    _does("top_k", integer(-1, 2**31 - 1), "0 or -1: all tokens"),
    _does("min_p", number(0, 1), "drops tokens less likely than min_p times the likeliest"),
    _does("presence_penalty", number(-2, 2), "subtracted once from the logit of every token in the output so far"),
    _does("frequency_penalty", number(-2, 2), "subtracted for every time a token is in the output so far"),
    _does("repetition_penalty", number(0, 10, above=True), "divides positive, multiplies negative logits of tokens seen"),
    _does("logit_bias", fields.logit_bias, "object of token id to bias in [-100, 100]"),
    _does("allowed_token_ids", fields.allowed_ids, "only these ids may be sampled"),
    _does("bad_words", fields.bad_words, "strings that are never completed, at the start of a word or inside one; of several "
          "tokens only the last is forbidden, once the others are in the output"),
    _does("stop", fields.stop_strings, "a string or a list: the text ends before the first that occurs"),
    _does("stop_token_ids", fields.stop_ids, "ids that end the answer, besides the model's own"),
    _does("ignore_eos", boolean, "the model's own end tokens do not end the answer"),
    _does("include_stop_str_in_output", boolean, "the text (and the ids) keep what ended the answer"),
    _does("skip_special_tokens", boolean, "special tokens have no text; default true"),
    _does("logprobs", boolean, "log-probabilities of generated tokens", CHAT),
    _does("top_logprobs", integer(0, "max_logprobs"), "alternatives per token; needs logprobs", CHAT),
    _does("logprobs", integer(0, "max_logprobs"), "alternatives per token, besides the token itself", COMPLETION),
    _does("prompt_logprobs", integer(0, "max_logprobs"), "log-probabilities of prompt tokens; not with stream", *BOTH),
    _does("echo", boolean, "the text begins with the prompt; with logprobs the prompt is scored too", COMPLETION),
    _does("stream", boolean, "server-sent events"),
    _does("resumable", boolean, "events have ids: GET /v1/streams/{id} goes on after the last one, on any gateway; only with "
          "stream, for a limited number of choices", *BOTH),
    _does("stream_options", fields.stream_options, "include_usage, continuous_usage_stats; only with stream", *BOTH),
    _does("add_generation_prompt", boolean, "the template opens the assistant's turn; default true", CHAT, RESPONSES),
    _does("continue_final_message", boolean, "the answer goes on with the text of the last message, whose turn stays open; not "
          "with add_generation_prompt: true", CHAT),
    _does("chat_template_kwargs", _raw, "object of extra variables for the chat template", CHAT, RESPONSES),
    _does("add_special_tokens", boolean, "the tokenizer adds its own, such as BOS; default false (the template does)", CHAT,
          RESPONSES),
    _does("add_special_tokens", boolean, "the tokenizer adds its own, such as BOS; default true", COMPLETION),
    _does("truncate_prompt_tokens", integer(-1, "max_tokens"), "keep only the last so many prompt tokens; -1: as many as fit",
          *BOTH),
    _does("return_token_ids", boolean, "prompt_token_ids and token_ids in the answer", *BOTH),
    _does("return_tokens_as_token_ids", boolean, "tokens of log-probabilities print as token_id:7", *BOTH),
    _does("input", _raw, "text, or a list of message items whose content is text or a list of text parts; other items are 400",
          RESPONSES),
    _does("instructions", fields.text, "a system message before the input", RESPONSES),
    _does("max_output_tokens", integer(1, "max_tokens"), "cap on generated tokens; input + cap beyond the model's length is "
          "400. Absent: as many as fit", RESPONSES),
    _does("top_logprobs", integer(0, "max_logprobs"), "alternatives per token", RESPONSES),
    _does("include", one_of([], ["message.output_text.logprobs"]), "`message.output_text.logprobs` asks for log-probabilities, "
          "as top_logprobs above 0 does; nothing else can be included", RESPONSES),
    _does("truncation", one_of("disabled", "auto"), "auto: cut an input that is too long at its beginning, to leave room for "
          "max_output_tokens (absent: 1); default disabled: refuse it", RESPONSES),
    _does("text", fields.text_options, "`format` of type text; default", RESPONSES),
    _does("stream_options", fields.plain_stream_options, "include_obfuscation may be false; only with stream", RESPONSES),
    _does("priority", integer(-(2**31), 2**31 - 1), "lower runs earlier; default 0"),
)  # fmt: skip

NO_EFFECT = (
    _idle("user", short_string, "a label for the provider's abuse monitoring"),
    _idle("safety_identifier", short_string, "a label for the provider's abuse monitoring", CHAT, RESPONSES),
    _idle("metadata", _labels, "labels of stored answers; nothing is stored", CHAT, RESPONSES),
    _idle(
        "prompt_cache_key", short_string, "a routing hint; every prompt prefix is found in the cache anyway", CHAT, RESPONSES
    ),
    _idle("parallel_tool_calls", boolean, "says how to call tools; there are none", CHAT, RESPONSES),
    _idle("store", one_of(False), "false is what happens: nothing is stored", CHAT, RESPONSES),
    _idle("service_tier", one_of("auto", "default"), "there is one tier", CHAT, RESPONSES),
    _idle("modalities", one_of(["text"]), "text is what is generated", CHAT),
    _idle("session_id", short_string, "a label"),
)

REFUSED = (
    _not("tools", [], apis=(CHAT, RESPONSES)),
    _not("tool_choice", "none", "auto", apis=(CHAT, RESPONSES)),
    _not("functions", [], apis=(CHAT,)),
    _not("function_call", "none", "auto", apis=(CHAT,)),
    _not("response_format", {"type": "text"}, apis=BOTH),
    _not("structured_outputs"),
    _not("guided_json"),
    _not("guided_regex"),
    _not("guided_choice"),
    _not("guided_grammar"),
    _not("guided_decoding_backend"),
    _not("guided_whitespace_pattern"),
    _not("structural_tag"),
    _not("audio", apis=(CHAT,)),
    _not("prediction", apis=(CHAT,)),
    _not("web_search_options", apis=(CHAT,)),
    _not("moderation", apis=(CHAT, RESPONSES)),
    _not("reasoning_effort", "none", apis=(CHAT,)),
    _not("verbosity", "medium", apis=(CHAT,)),
    _not("prompt_cache_retention", "in_memory", "in-memory", apis=(CHAT, RESPONSES)),
    _not("prompt_cache_options", {}, apis=(CHAT, RESPONSES)),
    _not("include_reasoning", True, apis=(CHAT,)),
    _not("thinking_token_budget", -1),
    _not("suffix", "", apis=(COMPLETION,)),
    _not("best_of", 1, apis=(COMPLETION,), why="not supported; ask for n choices"),
    _not("use_beam_search", False),
    _not("length_penalty", 1, 1.0, why="belongs to beam search, which is not supported"),
    _not("logits_processors", []),
    _not("logprob_token_ids"),
    _not("spaces_between_special_tokens", True),
    _not("truncation_side", "left"),
    _not("detokenize", True, why="text is made by the server, so that stop strings work"),
    _not("echo", False, apis=(CHAT,)),
    _not("documents", [], apis=(CHAT,)),
    _not("chat_template", apis=(CHAT,), why="templates come from the model only"),
    _not("mm_processor_kwargs", {}, apis=(CHAT,)),
    _not("media_io_kwargs", {}, apis=(CHAT,)),
    _not("prompt_embeds", apis=(COMPLETION,)),
    _not("cache_salt", why="who shares cached prompts is the server's business, not the body's"),
    _not("kv_transfer_params"),
    _not("ec_transfer_params"),
    _not("vllm_xargs", {}),
    _not("request_id", why="send the header X-Request-Id; it is echoed"),
    _not("repetition_detection"),
    _not("watermarking", False),
    _not("stream_interval", 1),
    _not("return_token_offsets", False),
    _not("return_prompt_text", False),
    _not("return_mm_kwargs", True),
    _not("routed_experts_prompt_start", 0),
    _not("previous_response_id", apis=(RESPONSES,), why="not supported: nothing is stored; send the conversation as input"),
    _not("conversation", apis=(RESPONSES,), why="not supported: nothing is stored; send the conversation as input"),
    _not("background", False, apis=(RESPONSES,)),
    _not("background_options", {}, apis=(RESPONSES,)),
    _not("context_management", [], apis=(RESPONSES,)),
    _not("max_tool_calls", apis=(RESPONSES,)),
    _not("prompt", apis=(RESPONSES,), why="stored prompts are not supported; send input"),
    _not("reasoning", {}, {"effort": None}, {"effort": "none"}, apis=(RESPONSES,)),
    _not("access_programs", {}, apis=(RESPONSES,)),
    _not("image", {}, apis=(RESPONSES,)),
)

FIELDS = {
    api: {each.name: each for each in (*IMPLEMENTED, *NO_EFFECT, *REFUSED) if api in each.apis} for api in ALL
}  # fmt: skip


def table(api: str) -> str:
    """The fields of one API as a Markdown table."""
    rows = ["| field | | rule |", "|---|---|---|"]
    for name, each in sorted(FIELDS[api].items()):
        note = each.note
        if each.kind == "refused":
            note += "; null" + "".join(f" or `{json.dumps(value)}`" for value in each.harmless) + " passes"
        rows.append(f"| `{name}` | {each.kind} | {note} |")
    return "\n".join(rows)
