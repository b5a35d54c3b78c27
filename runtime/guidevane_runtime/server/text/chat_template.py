"""Chat messages to a prompt, by the model's own Jinja template, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from guidevane_runtime.errors import InvalidRequest, StartError
from guidevane_runtime.server.text.tokenizer import SpecialTokens

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises on messages that it was not written for; its filters raise whatever Python does."""


class ChatTemplate:
    """A compiled template. Only the model's own is rendered, never one that a client sent."""

    def __init__(self, source: str, special: SpecialTokens) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise StartError(f"the model's chat template does not compile: {error}") from error
        self._names = {"bos_token": special.bos or "", "eos_token": special.eos or ""}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. A template that refuses it raises InvalidRequest with its own message."""
        # Ours last: a client's extra can't replace them.
        ours = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **self._names}
        try:
            return self._template.render({**(extra or {}), **ours})
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; in serving its content is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the type is Jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes <, >, & for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
