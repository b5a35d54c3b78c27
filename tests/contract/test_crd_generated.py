"""The CRD and the field reference are what the models say, and small."""

import re

import pytest
import yaml

from guidevane_api.crd import MAX_BYTES, ROOT, crd, generated_files, structural_schema


@pytest.mark.parametrize("path", sorted(generated_files(), key=str), ids=str)
def test_the_file_is_what_the_models_generate(path):
    assert (ROOT / path).read_text() == generated_files()[path], f"{path} is out of date; run `make crds`"


def test_the_crd_file_is_below_60_kb():
    assert (ROOT / "crds" / "llmservices.yaml").stat().st_size < MAX_BYTES


def test_the_yaml_says_what_the_object_says():
    assert yaml.safe_load((ROOT / "crds" / "llmservices.yaml").read_text()) == crd()


def places(schema, path):
    """Every place of the schema with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from places(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from places(schema[key], f"{path}[]")


SPEC = list(places(structural_schema()["properties"]["spec"], "spec"))
STATUS = list(places(structural_schema()["properties"]["status"], "status"))


def test_nothing_that_a_structural_schema_forbids_is_left():
    forbidden = {"$ref", "anyOf", "allOf", "oneOf", "title", "const", "exclusiveMinimum", "exclusiveMaximum"}
    left = [(path, key) for path, schema in SPEC + STATUS for key in schema if key in forbidden or "guidevane" in key]
    assert left == []


def test_a_quantity_may_be_a_number_or_a_string_with_a_unit():
    quantities = {path: schema for path, schema in SPEC if schema.get("x-kubernetes-int-or-string")}
    assert "spec.envelope.kvCacheMemory" in quantities
    assert all("pattern" in schema and "type" not in schema for schema in quantities.values())


def test_every_field_is_described_once():
    silent = [path for path, schema in SPEC + STATUS if not schema.get("description") and not path.endswith("[]")]
    terse = ("status.limits.desired.", "status.retune.proposal.")
    assert [path for path in silent if not path.startswith(terse)] == []


def test_every_string_list_and_map_of_the_spec_is_bounded():
    bound = {"string": "maxLength", "array": "maxItems"}
    unbounded = [
        path
        for path, schema in SPEC
        if (schema.get("type") in bound and "enum" not in schema and bound[schema["type"]] not in schema)
        or ("additionalProperties" in schema and "maxProperties" not in schema)
    ]
    assert unbounded == []


def test_the_reference_says_of_each_field_what_the_schema_says_and_has_its_default_in_a_column():
    page = (ROOT / "docs" / "api-reference.md").read_text()
    assert "| `model` | object | required | The model that is served. Takes a rollout. |" in page
    assert "| `blockSize` | integer, 1 to 256 | `16` | Tokens in one KV-cache block. Takes a rollout. |" in page
    assert [line for line in page.splitlines() if re.search(r"[a-z]\.[A-Z][a-z]", line)] == []


def test_the_api_has_no_floats():
    assert [path for path, schema in SPEC + STATUS if schema.get("type") == "number"] == []


def test_a_field_of_pods_says_that_a_change_is_a_rollout_and_a_gate_that_it_is_live():
    described = {path: schema.get("description", "") for path, schema in SPEC}
    assert described["spec.envelope.blockSize"] == "Tokens in one KV-cache block. Default 16. Takes a rollout."
    assert described["spec.limits.maxQueuedRequests"].endswith("Default 256. Live.")
    assert described["spec.autoscaling"].endswith("Not in effect yet: refused.")


def test_status_can_be_written_in_parts_and_has_no_defaults():
    assert [path for path, schema in STATUS if "default" in schema] == []
    required = {path: schema["required"] for path, schema in STATUS if "required" in schema}
    assert required == {"status.conditions[]": ["type", "status"]}
