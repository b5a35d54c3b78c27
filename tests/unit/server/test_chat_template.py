import pytest

from guidevane_runtime.errors import InvalidRequest, StartError
from guidevane_runtime.server.text.chat_template import ChatTemplate
from guidevane_runtime.server.text.tokenizer import SpecialTokens

MESSAGES = [{"role": "user", "content": "1 < 2 & 3"}]


def render(source: str, **more: object) -> str:
    return ChatTemplate(source, SpecialTokens("<s>", "</s>")).render(MESSAGES, extra=more)


def test_messages_and_special_tokens_are_there() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>1 < 2 & 3</s>"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if m.role %}\nx\n  {% endif %}\n{% endfor %}") == "x\n"


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ messages[0].content | tojson }}") == '"1 < 2 & 3"'


def test_the_generation_block_is_its_content() -> None:
    assert render("{% generation %}answer{% endgeneration %}") == "answer"


def test_a_template_that_refuses_says_so_with_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="only users speak"):
        render("{{ raise_exception('only users speak') }}")


def test_a_filter_that_does_not_like_a_value_refuses_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="no attribute 'items'"):
        render("{{ mode | dictsort }}", mode=3)


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidRequest):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_a_template_cannot_change_the_messages() -> None:
    with pytest.raises(InvalidRequest):
        render("{{ messages.append(1) }}")


def test_extra_names_cannot_replace_ours() -> None:
    assert render("{{ messages | length }}{{ bos_token }}{{ mode }}", messages=[], bos_token="no", mode="m") == "1<s>m"


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(StartError, match="does not compile"):
        ChatTemplate("{% if %}", SpecialTokens())
