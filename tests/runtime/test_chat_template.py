"""Chat templates come with a model, so they are run in a sandbox and may be wrong."""

from __future__ import annotations

import pytest

from edgedraft.runtime import FolderError, PromptError
from edgedraft.runtime.chat_template import render_chat
from graphs import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "Hello"}]


def test_messages_become_a_prompt_for_the_next_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert render_chat(CHAT_TEMPLATE, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_text_of_the_user_is_text_and_no_template() -> None:
    nasty = "{{ 7 * 7 }} {% raise %} <b>&amp;</b> \U0001f600"
    assert nasty in render_chat(CHAT_TEMPLATE, [{"role": "user", "content": nasty}])


def test_special_tokens_are_handed_to_the_template() -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    assert render_chat(template, HELLO, bos_token="<s>", eos_token="</s>") == "<s>Hello</s>"


def test_a_template_may_refuse_messages() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="refuses the messages: roles must alternate"):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages | attr('__class__') | attr('__base__') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set x = messages.append(1) %}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '%s' | format(messages.__class__) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(FolderError, match="chat template cannot be rendered") as caught:
        rendered = render_chat(template, HELLO)
        assert "class" not in rendered and "function" not in rendered, rendered
        raise FolderError("the model's chat template cannot be rendered: it gave nothing away")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}",
        "{{ messages[0]['content' }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 'x' | nofilter }}",
        "{{ {}['missing'].x }}",
        "{{ range(10 ** 9) | list }}",
        "{{ [1, 2] | sort(attribute='x') | first.y }}",
        "{{ ''.encode('no-such-codec') }}",
        "{{ strftime_now(3) }}",
        "{{ messages | tojson(indent='a' * 3, nonsense=1) }}",
        "{{ {1: messages, (1, 2): 3} | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_broken_template_is_one_error(template: str) -> None:
    with pytest.raises(FolderError, match="chat template cannot be rendered") as caught:
        render_chat(template, HELLO)
    assert "\n" not in str(caught.value)


def test_what_templates_use_in_practice_works() -> None:
    template = (
        "{%- for m in messages -%}{%- if m.role == 'x' -%}{%- continue -%}{%- endif -%}"
        "{{- m | tojson -}}{%- if loop.last -%}{%- break -%}{%- endif -%}{%- endfor -%}"
        "{%- set ns = namespace(n=0) -%}{%- set ns.n = ns.n + 2 -%}{{ ns.n }}"
        "{{ messages[0]['content'].strip().split('l')[0] }}"
    )
    assert render_chat(template, [{"role": "user", "content": "Hé<l>"}]) == (
        '{"role": "user", "content": "Hé<l>"}2Hé<'
    )
    assert len(render_chat("{{ strftime_now('%Y') }}", HELLO)) == 4
