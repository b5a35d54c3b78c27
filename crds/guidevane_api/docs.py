"""The field reference of LLMService as Markdown: one table for each block, made from the CRD's own schema."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise

from guidevane_api.conditions import ConditionType, EventReason, Reason
from guidevane_api.schema import RULES_KEY, JsonObject, default_sentence, render

_HEAD = """<!-- Generated from crds/guidevane_api by `make crds`. Do not edit. -->

# LLMService

Group `guidevane.dev`, version `v1alpha1`, short names `llm` and `llmsvc`. `kubectl explain llm.spec` says the same.
Kubernetes 1.30 or newer.

A field marked "Live" is followed by running pods, or by the operator, within seconds and without a restart. A field
marked "Takes a rollout" replaces the pods, one after the other.

A field marked "Not in effect yet" is in the schema so that your manifests stay valid. While it is set, the condition
`SpecAccepted` is False with reason `FieldNotInEffect` and names it; nothing is silently ignored. A field of status that
is marked "Not written yet" stays empty, with all that is in it.
"""


def api_reference(schema: JsonObject) -> str:
    """The whole page."""
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    parts = [_HEAD, "## Spec\n", *_tables("spec", spec), "## Rules\n", _RULES_HEAD]
    parts += [f"* {message}" for message in rule_messages(schema)]
    parts += ["\n## Status\n", *_tables("status", status)]
    parts += ["## Conditions\n", _words(ConditionType, "Condition", "True means")]
    parts += ["## Reasons\n", _words(Reason, "Reason", "Meaning")]
    parts += ["## Events\n", _words(EventReason, "Event", "Meaning")]
    return "\n".join(parts)


_RULES_HEAD = """The API server itself refuses what breaks one of these, with the sentence and the field, also while the
operator is down.
"""


def rule_messages(schema: JsonObject) -> Iterator[str]:
    """The message of every CEL rule, outermost first."""
    for rule in schema.get(RULES_KEY, ()):
        yield rule["message"]
    for field in schema.get("properties", {}).values():
        yield from rule_messages(field)
    if "items" in schema:
        yield from rule_messages(schema["items"])


def _tables(path: str, schema: JsonObject) -> Iterator[str]:
    """The table of one block, then those of the blocks in it."""
    fields = schema["properties"]
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(field)} | {'required' if name in required else _default(field)} | {_cell(field)} |"
        for name, field in fields.items()
    ]
    yield "\n".join([f"### {path}\n", "| Field | Type | Default | |", "|---|---|---|---|", *rows]) + "\n"
    for name, field in fields.items():
        inner, suffix = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" in inner:
            yield from _tables(f"{path}.{name}{suffix}", inner)


def _type(field: JsonObject) -> str:
    """The type in words, with its bounds."""
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "integer" and "minimum" in field:
        bounds = f"{field['minimum']} to {field['maximum']}" if "maximum" in field else f"{field['minimum']} or more"
        return f"integer, {bounds}"
    return f"list of {field['items']['type']}s" if "items" in field else str(field["type"])


def _default(field: JsonObject) -> str:
    """The static default, if there is one."""
    default = field.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{render(default)}`"


def _cell(field: JsonObject) -> str:
    """The description as one table cell."""
    text: str = field.get("description", "")
    if default := default_sentence(field):  # it has a column
        text = text.replace(f" {default}", "")
    return text.replace("|", "\\|").replace("<", "&lt;")


def _words(words: type[StrEnum], name: str, meaning: str) -> str:
    """A table of the words of one enumeration."""
    rows = [f"| `{word}` | {text} |" for word, text in docstrings_of(words).items()]
    return "\n".join([f"| {name} | {meaning} |", "|---|---|", *rows]) + "\n"


def docstrings_of(words: type[StrEnum]) -> dict[StrEnum, str]:
    """Member -> the docstring under it. Python keeps none for members, so it is read from the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(words))).body[0]
    assert isinstance(body, ast.ClassDef), "the source of a class begins with the class"
    found: dict[StrEnum, str] = {}
    for member, text in pairwise(body.body):
        if isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name) and isinstance(text, ast.Expr):
            found[words[member.targets[0].id]] = " ".join(ast.literal_eval(text.value).split())
    return found
