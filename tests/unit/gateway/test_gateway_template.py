"""Chat templates: rendered as the reference library renders them, stopped when they loop or eat memory, in the time allowed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import served_model
from gateway.chat_template import ChatTemplate
from gateway.errors import BadRequest
from gateway.template_child import Renderer
from tests import gateway_toys

HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., AbstractAsyncContextManager[ChatTemplate]]


@asynccontextmanager
async def template(source: str, timeout_s: float = 2.0, max_chars: int = 10_000) -> AsyncIterator[ChatTemplate]:
    made = ChatTemplate(source, {"bos_token": "<s>"}, timeout_s=timeout_s, max_chars=max_chars)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def test_renders_with_the_models_tokens_and_extra_variables() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ think }}{{ add_generation_prompt }}"
    )
    async with template(source) as made:
        assert await made.render(HI, True, {"think": "no"}) == "<s>user:hi;noTrue"


async def test_developer_messages_are_system_messages_where_a_template_knows_no_developer() -> None:
    message = [{"role": "developer", "content": "x"}]
    async with template("{{ messages[0].role }}") as made:
        assert await made.render(message, True, None) == "system"
    async with template("{# developer #}{{ messages[0].role }}") as made:
        assert await made.render(message, True, None) == "developer"


async def test_the_last_message_is_continued_whatever_the_template_puts_around_it() -> None:
    talk = [*HI, {"role": "assistant", "content": "hi and "}]
    async with template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}") as made:
        assert await made.continued(talk, None) == "<user>hi</user><assistant>hi and "
        assert await made.continued([*HI, {"role": "assistant", "content": ""}], None) == "<user>hi</user><assistant>"
    async with template("{{ messages[0].content }}") as made:
        with pytest.raises(BadRequest) as caught:
            await made.continued(talk, None)
        assert caught.value.param == "continue_final_message"


LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = ('x' * (30000000 + a)) | replace('x', 'y') | length %}{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS)
async def test_s32_a_template_that_loops_is_stopped_and_the_next_request_works(source: str) -> None:
    source = "{% if messages[0].content == 'loop' %}" + source + "{% endif %}done"
    async with template(source, timeout_s=0.3) as made:
        started = time.monotonic()
        with pytest.raises(BadRequest) as caught:
            await made.render([{"role": "user", "content": "loop"}], True, None)
        assert caught.value.code == "chat_template_timeout"
        assert time.monotonic() - started < 2
        assert await made.render(HI, True, None) == "done"


async def test_s32_a_template_that_eats_memory_hurts_only_itself() -> None:
    async with template("{% if messages[0].content == 'eat' %}{{ 'x' * 9999999999 }}{% endif %}done") as made:
        with pytest.raises(BadRequest):
            await made.render([{"role": "user", "content": "eat"}], True, None)
        assert await made.render(HI, True, None) == "done"


async def test_rendered_text_is_bounded() -> None:
    async with template("{% for a in range(20000) %}x{% endfor %}") as made:
        with pytest.raises(BadRequest) as caught:
            await made.render(HI, True, None)
        assert caught.value.code == "prompt_too_long"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"],
)
async def test_what_a_template_refuses_is_a_bad_request(source: str) -> None:
    async with template(source) as made:
        with pytest.raises(BadRequest) as caught:
            await made.render(HI, True, None)
        assert caught.value.param == "messages"
        if "raise_exception" in source:
            assert "roles must alternate" in caught.value.text


async def test_the_sandbox_holds() -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    async with template(source) as made:
        with pytest.raises(BadRequest):
            await made.render(HI, True, None)


async def test_a_client_that_leaves_meanwhile_leaves_the_template_usable() -> None:
    async with template("{% for a in range(20000) %}{% endfor %}{{ messages[0].content }}") as made:
        tasks = [asyncio.create_task(made.render([{"role": "user", "content": str(at)}], True, None)) for at in range(5)]
        await asyncio.sleep(0)  # the first is being rendered
        tasks[0].cancel()
        tasks[2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [results[1], results[3], results[4]] == ["1", "3", "4"]
        assert all(isinstance(results[at], asyncio.CancelledError) for at in (0, 2))


async def test_a_template_that_does_not_compile_is_told_at_the_start() -> None:
    made = ChatTemplate("{% for %}", {}, timeout_s=1, max_chars=10)
    with pytest.raises(ValueError, match="does not compile"):
        await made.start()
    await made.close()


# Written for this test in the manner of well-known models.
LLAMA_LIKE = (
    "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
    "{{- '<|start|>system<|end|>\\n\\n' + system + '<|eot|>' }}\n"
    "{%- for message in messages %}\n    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}\n"
    "        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}\n"
    "    {%- elif 'tool_calls' in message %}\n        {{- message.tool_calls[0].function.arguments | tojson }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|end|>\\n\\n' }}\n{%- endif %}\n"
)
QWEN_LIKE = (
    "{%- set ns = namespace(last=0) %}\n{%- for m in messages %}\n{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}\n{%- endfor %}\n{%- for m in messages %}\n    {%- if loop.index0 == ns.last %}\n"
    "        {{- '<u>' + m.content + '</u>\\n' }}\n        {%- continue %}\n    {%- endif %}\n"
    "    {% generation %}{{- m.content.strip('\\n').split('</think>')[-1] }}{% endgeneration %}\n{%- endfor %}\n"
)
CHATS: list[list[dict[str, Any]]] = [
    HI,
    [{"role": "system", "content": " be kind "}, *HI, {"role": "assistant", "content": "<b>x</b></think>y\n"}, *HI],
    [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": "<1>"}}}],
        },
    ],
]


@pytest.mark.parametrize("source", [LLAMA_LIKE, QWEN_LIKE, gateway_toys.TEMPLATE])
@pytest.mark.parametrize("messages", CHATS)
def test_renders_what_the_reference_renders(source: str, messages: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    reference: Any = render_jinja_template
    expected, _ = reference([messages], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert Renderer(source, {"bos_token": "<s>"}, 10**6).render(messages, True, None) == expected[0]


@pytest.mark.parametrize("prompt", ["<s>hello", "hello"])
@pytest.mark.parametrize("add", [True, False])
def test_s26_exactly_one_bos(tmp_path: Path, prompt: str, add: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = gateway_toys.byte_level()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    model = served_model.load(gateway_toys.write_model(tmp_path, tokenizer), "toy", "f")
    ids = model.tokenizer.encode(prompt, add)
    bos = model.tokenizer.bos_id
    assert ids.count(bos or -1) == int(add or prompt.startswith("<s>"))
