from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from models import ChatTemplateError
from models.chat import render_chat

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.arguments | tojson }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b>&</b> \u00e9"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  two\n\nlines "},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "again"},
    ],
    [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {"q": "<é>", "n": 1}}]}],
]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", [CHATML, QWEN, "{{ bos_token }}  {% if 1 %}\n a{% endif %}\n"])
def test_renders_as_transformers_does(template, messages, prompt):
    tokens: dict[str, Any] = {"bos_token": "<s>"}
    ours = render_chat(template, messages, tokens, add_generation_prompt=prompt)
    theirs, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=prompt, **tokens
    )
    assert ours == theirs[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__func__ }}",
        "{% for key in messages[0].__init__.__globals__ %}{% endfor %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_malicious_templates_are_refused(template):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ChatTemplateError, match=r"refused|failed"):
        render_chat(template, messages, {})
    assert messages == [{"role": "user", "content": "hi"}]


def test_long_output_is_refused(monkeypatch):
    monkeypatch.setattr("models.chat.MAX_CHARACTERS", 10)
    with pytest.raises(ChatTemplateError, match="10 characters"):
        render_chat("{% for i in range(9) %}ab{% endfor %}", [], {})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "failed"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content.strip() }}", "failed"),
    ],
)
def test_failing_templates_say_why(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, [], {})


def test_arithmetic_still_works():
    assert render_chat("{{ 3 * 4 }}{{ 'a' ~ range(3) | list }}", [], {}) == "12a[0, 1, 2]"
