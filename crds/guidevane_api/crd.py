"""Writes `crds/llmservices.yaml` and `docs/api-reference.md` from the models: `python -m guidevane_api.crd`.

The API server takes structural schemas only: no `$ref`, no unions, types at every level. What pydantic adds
beyond that is dropped here, our own marks become text, and static defaults are kept so that rules can count on them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from guidevane_api.docs import api_reference
from guidevane_api.llmservice import GROUP, KIND, PLURAL, VERSION, LLMService
from guidevane_api.schema import (
    EFFECT_KEY,
    LATER_KEY,
    RULES_KEY,
    TERSE_KEY,
    JsonObject,
    Later,
    default_sentence,
    inlined,
)

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 60_000
"""A CRD stays below this: client-side `kubectl apply` keeps a copy of it in an annotation of at most 262144 bytes."""

COLUMNS = (
    ("Ready", "string", ".status.readySummary"),
    ("Reason", "string", ".status.reason"),
    ("Seqs", "integer", ".status.limits.desired.maxNumSeqs"),
    ("TTFT-P95", "integer", ".status.slo.ttftP95Milliseconds"),
    ("ITL-P95", "integer", ".status.slo.itlP95Milliseconds"),
    ("SLO%", "integer", ".status.slo.attainmentPercent"),
    ("KV%", "integer", ".status.slo.kvCachePercent"),
    ("Retune", "string", ".status.retune.state"),
    ("Scale", "string", ".status.autoscaling.limitedBy"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
"""Columns of `kubectl get llm`: name, type, JSON path."""
WIDE_COLUMNS = (
    ("Batched", "integer", ".status.limits.desired.maxNumBatchedTokens"),
    ("Chunk", "integer", ".status.limits.desired.prefillChunkSize"),
    ("KVLim", "integer", ".status.limits.desired.kvCacheUtilizationLimitPercent"),
    ("Epoch", "integer", ".status.limits.epoch"),
    ("Want", "integer", ".status.autoscaling.recommended"),
    ("Rev", "string", ".status.rollout.revision"),
    ("Metrics", "string", ".status.metrics.state"),
    ("Model", "string", ".spec.model.uri"),
    ("Endpoint", "string", ".status.endpoint"),
)
"""More columns of `kubectl get llm -o wide`."""

_DROPPED = ("title", "additionalProperties", LATER_KEY, EFFECT_KEY, TERSE_KEY)


def crd() -> JsonObject:
    """The CustomResourceDefinition as an object."""
    columns = [_column(*column) for column in COLUMNS]
    columns += [_column(*column) | {"priority": 1} for column in WIDE_COLUMNS]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["llm", "llmsvc"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": structural_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def structural_schema() -> JsonObject:
    """The models as a structural OpenAPI v3 schema."""
    document = inlined(LLMService.model_json_schema())
    fields = document["properties"]
    schema = {key: value for key, value in document.items() if key not in ("properties", "title")}
    schema.pop("additionalProperties", None)
    schema["properties"] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
        "spec": _structural(fields["spec"]),
        "status": _structural(fields["status"], keep_defaults=False),
    }
    return schema


def _structural(node: JsonObject, *, keep_defaults: bool = True, effect: str = "") -> JsonObject:
    """One place of the schema as the API server wants it. A block says when it takes effect, and so do its fields."""
    own = node.get(EFFECT_KEY, "")
    later = Later.from_schema(node)
    schema = {key: value for key, value in node.items() if key not in (*_DROPPED, "default", "properties", "items")}
    schema["description"] = _description(node, later, "" if later and not later.ready else own or effect)
    if "properties" in node:
        schema["properties"] = {
            name: _structural(field, keep_defaults=keep_defaults, effect=own)
            for name, field in node["properties"].items()
        }
    if TERSE_KEY in node:
        for field in schema["properties"].values():
            del field["description"]
    if "items" in node:
        schema["items"] = _structural(node["items"], keep_defaults=keep_defaults)
        schema["items"].pop("description", None)  # the list has one
    if isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(node["additionalProperties"])
    if node.get("x-kubernetes-int-or-string"):
        schema.pop("type")
    if not keep_defaults:
        for bound in ("required", "minimum", "maximum"):
            schema.pop(bound, None)
        if node.get("x-kubernetes-list-map-keys"):
            schema["items"]["required"] = node["items"]["required"]
    elif not later or later.ready:
        schema.update(_default(node, schema))
    if not schema["description"]:
        del schema["description"]
    return schema


def _default(node: JsonObject, schema: JsonObject) -> JsonObject:
    """The default to write into the CRD, if it says anything. A block defaults to {}: its fields fill it.

    Except a block with rules: the API server tries them on the default as it is written.
    """
    default = node.get("default")
    if isinstance(default, dict):
        fields = schema.get("properties", {})
        filled = {name: field["default"] for name, field in fields.items() if "default" in field}
        if not filled:
            return {}
        return {"default": filled if RULES_KEY in node else {}}
    return {} if default in (None, "", []) else {"default": default}


def _description(node: JsonObject, later: Later | None, effect: str) -> str:
    """What kubectl explain says: the docstring, the default, when a change takes effect, whether it works yet."""
    text = " ".join(node.get("description", "").split())
    if not text:
        return ""
    sentences = [text, default_sentence(node), effect, later.sentence() if later else ""]
    return " ".join(sentence for sentence in sentences if sentence)


def _column(name: str, kind: str, path: str) -> JsonObject:
    """One printer column."""
    return {"name": name, "type": kind, "jsonPath": path}


class _Line(dict[str, Any]):
    """A mapping that the YAML shows on one line: indentation would be a third of the file otherwise."""


class _CRDDumper(yaml.SafeDumper):
    """Knows lines."""


_CRDDumper.add_representer(
    _Line, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
)
BLOCK_DEPTH = 11
"""Depth of the fields of spec's blocks, as in spec.limits.maxNumSeqs: each is one line, whatever it holds."""


def _on_lines(node: Any, depth: int = 0) -> Any:
    """Put each field of a block of spec, and each block of status, on one line."""
    if isinstance(node, list):
        return [_on_lines(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if depth >= BLOCK_DEPTH or not any(isinstance(value, dict | list) for value in node.values()):
        return _Line(node)
    # status is read less often than spec: one line per block of it is enough
    return {key: _on_lines(value, depth + (2 if key == "status" else 1)) for key, value in node.items()}


def crd_yaml() -> str:
    """The CRD as the text of `crds/llmservices.yaml`."""
    head = "# Generated from crds/guidevane_api by `make crds`. Do not edit.\n"
    text = head + yaml.dump(_on_lines(crd()), Dumper=_CRDDumper, sort_keys=False, width=65536, allow_unicode=True)
    size = len(text.encode())
    assert size < MAX_BYTES, f"the CRD has {size} bytes, more than {MAX_BYTES}"
    return text


def generated_files() -> dict[Path, str]:
    """Path below the repository's root -> text, of everything that is made from the models."""
    return {
        Path("crds/llmservices.yaml"): crd_yaml(),
        Path("docs/api-reference.md"): api_reference(structural_schema()),
    }


def main(argv: Sequence[str]) -> int:
    """Write the files, or with --check say which ones differ."""
    parser = argparse.ArgumentParser(prog="python -m guidevane_api.crd", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a file is out of date")
    check = parser.parse_args(argv).check
    stale = 0
    for path, text in generated_files().items():
        target = ROOT / path
        if target.exists() and target.read_text() == text:
            continue
        stale += 1
        if check:
            sys.stderr.write(f"{path} is out of date; run `make crds`\n")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            sys.stderr.write(f"wrote {path}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
