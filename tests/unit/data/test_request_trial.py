"""Constraints and tools that a server refuses, or that its grammar does not enforce, are refused before the start."""

import json
import signal
import time
from pathlib import Path

import pytest

from megagrpo.data.tokens.request_trial import RequestTrial, shared_trial
from megagrpo.data.tokens.row_settings import RowReader
from tests.unit.data.test_prompts import tokenizer  # noqa: F401 (a fixture)
from tests.unit.data.test_row_sampling import run
from tests.unit.for_each import for_each

INTEGER, PAIR = {"type": "integer"}, {"a": {"type": "integer"}, "b": {"type": "integer"}}
OF_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def in_a(schema, **more):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


# A schema, and what its refusal says; None if it is valid. The first seventeen: what users sent.
SCHEMAS = [
    ({"type": "integer", "multipleOf": 5}, "`multipleOf` at #: xgrammar ignores it; remove it"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "`uniqueItems` at #"),  # set[int] of pydantic
    ({"type": "array", "contains": {"const": 1}}, "`contains` at #"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "vLLM refuses `pattern` and `maxLength` in"),
    ({"allOf": [INTEGER, {"minimum": 5}]}, "`allOf` at #: xgrammar reads an allOf of one schema only; merge"),
    (
        in_a({"type": "number", "multipleOf": 0.01, "title": "A"}),
        "`multipleOf` at #/properties/a",
    ),  # Field(multiple_of)
    ({"type": "object", "patternProperties": {"^x": INTEGER, "^y": INTEGER}}, "vLLM refuses `patternProperties`"),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, None),
    ({"type": "object", "properties": PAIR, "minProperties": 1}, None),
    ({"type": "object", "properties": PAIR, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "`if` at #"),
    ({"type": "integer", "not": {"const": 5}}, "`not` at #"),
    ({"type": "object", "properties": PAIR, "dependentSchemas": {"a": {"required": ["b"]}}}, "`dependentSchemas` at #"),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False}, None),
    (in_a({"const": "x", "type": "string"}), None),
    ({"enum": ["a", 1, None, 1.5, [1]]}, None),
    ({"type": "string", "format": "date"}, None),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}}, None),
    # siblings: without a type, beside another keyword, beyond what xgrammar reads
    ({"multipleOf": 5}, "`multipleOf` at #: xgrammar ignores it without `type`; add `type`"),
    ({"items": INTEGER, "uniqueItems": True}, "`uniqueItems` at #"),
    ({"minimum": 2}, "`minimum` at #"),
    ({"required": ["a"]}, "`required` at #"),
    ({"type": "object", "properties": PAIR, "required": ["c"]}, "`required` at #: xgrammar ignores 'c'"),
    ({"type": "integer", "allOf": []}, "`allOf` at #"),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, "`type` at #: xgrammar reads only `anyOf`"),
    ({"enum": [1, 9], "maximum": 5}, "`maximum` at #: xgrammar reads only `enum`"),
    ({"type": "integer", "enum": ["a", 1]}, "`type` at #: xgrammar reads only `enum`"),
    (in_a({"$ref": "#/$defs/A", "maximum": 5}, **{"$defs": {"A": INTEGER}}), "`maximum` at #/properties/a"),
    ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, "`oneOf` at #: write anyOf"),
    ({"type": "string", "pattern": "^(?=a)[ab]+$"}, "Lookahead assertion is not supported"),
    ({"type": "string", "pattern": "a^b"}, "Anchor '^' in the middle"),
    ({"type": "string", "pattern": '^"$'}, "`pattern` at #: xgrammar writes quotes"),
    ({"type": "string", "pattern": '^[^"]+$'}, None),
    ({"type": "string", "pattern": "^a$", "format": "date"}, "`pattern` at #: xgrammar reads only `format`"),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, "vLLM refuses `uniqueItems`"),
    ({"type": []}, "`type` at #"),
    ({"type": "str"}, "xgrammar cannot compile the json: Unsupported type"),
    # references
    ({"$ref": "#/$defs/B"}, "Cannot find field $defs"),
    ({"$ref": "file:///etc/passwd"}, "`$ref` at #: 'file:///etc/passwd' is not below `#/`"),
    (in_a({"$ref": "http://x.y/z.json"}), "`$ref` at #/properties/a"),
    (in_a({"$ref": "#A"}, **{"$defs": {"A": {"$anchor": "A", "type": "integer"}}}), "`$ref` at #/properties/a"),
    (in_a({"$dynamicRef": "#"}), "`$dynamicRef` at #/properties/a"),
    (in_a({"$ref": "#/$defs/A"}, **{"$defs": {"A": INTEGER}}), None),
    # no end
    (in_a({"$ref": "#"}), "the json can never end after rule `root`"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#"}}}, "can never end"),
    (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": in_a({"$ref": "#/$defs/N"})}},
        "can never end",
    ),
    # what a keyword of the same name elsewhere, an annotation or OpenAPI's discriminator means
    (in_a(INTEGER, title="multipleOf", **{"x-order": 3}), None),
    ({"type": "object", "properties": {"not": INTEGER, "uniqueItems": {"type": "boolean"}}}, None),
    (
        {
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "a"},
            "$defs": {"A": in_a({"const": "x"}), "B": in_a({"const": "y"})},
        },
        None,
    ),
    (in_a({"anyOf": [INTEGER, {"type": "null"}], "default": None}), None),
]
# Schemas and grammars that users of vLLM, TRL and verl have reported.
ANIMALS = {"animals_seen": {"type": "integer", "minimum": 1, "maximum": 5}, "names": {"type": "array", "items": {}}}
REPORTED = [
    ({"allOf": [{"$ref": "#/$defs/Base"}, OF_A], "$defs": {"Base": OF_A}}, "`allOf` at #"),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "can never end"),
    ({"type": "object", "properties": ANIMALS, "required": ["animals_seen"]}, None),
    ({"type": "array", "items": in_a({"type": "string"}), "minItems": 1}, None),
    (
        in_a(
            {"$ref": "#/$defs/Car"}, **{"$defs": {"Car": {"enum": ["sedan", "SUV"], "title": "Car", "type": "string"}}}
        ),
        None,
    ),
    (
        in_a(
            {"oneOf": [{"type": "integer", "minimum": 0}, {"$ref": "#/$defs/L"}]},
            **{"$defs": {"L": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}}},
        ),
        "`oneOf` at #/properties/a: write anyOf",
    ),
    (
        in_a({"description": "the final answer", "title": "Final Answer", "type": "string"}, title="StructuredOutput"),
        None,
    ),
]
OTHERS = [
    *[({"json": json.dumps(schema)}, said) for schema, said in REPORTED],
    (
        {"grammar": "?start: expression\n?expression: NUMBER\n%import common.NUMBER"},
        "xgrammar cannot compile the grammar",
    ),
    ({"regex": "<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>"}, None),
    ({"regex": "[a"}, "xgrammar cannot compile the regex: Regex parsing error at position 3: Unclosed '['"),
    ({"regex": "(?=a)b"}, "Lookahead is not supported"),
    ({"regex": "a$b"}, "xgrammar does not enforce the regex"),
    ({"regex": r"\Aab\Z"}, r"Escape sequence '\A' is not recognized"),
    ({"regex": r"[^\s\S]"}, "can never end"),
    ({"regex": r"<answer>-?[0-9]+</answer>"}, None),
    ({"grammar": 'start ::= "a"'}, 'The root rule with name "root" is not found'),
    ({"grammar": "root ::= a"}, 'Rule "a" is not defined'),
    ({"grammar": 'root ::= "a" root'}, "the grammar can never end after rule `root`"),
    ({"grammar": 'root ::= "a" | "b" x\nx ::= "c" x'}, "the grammar can never end after rule `x`"),
    ({"grammar": 'root ::= ("a" root){1,3} "b"'}, "can never end"),
    ({"grammar": 'root ::= ("a" root){0,3} "b"'}, None),
    ({"grammar": 'root ::= "b" | "a" root\nunused ::= unused'}, None),
    ({"grammar": '# ::=\nstart: "a"'}, "vLLM reads it as a Lark grammar"),
    ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "Nest layer exceeded"),
    ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "nested too deeply"),
    ({"json": json.dumps({"enum": [f"word {i}" for i in range(100_000)]})}, "bytes, and the limit is 1048576"),
]


@for_each(("request_", "said"), [*[({"json": json.dumps(schema)}, said) for schema, said in SCHEMAS], *OTHERS])
def test_what_a_server_refuses_or_half_reads_is_refused(request_, said):
    refusal = shared_trial().refusal(request_)
    assert refusal is None if said is None else refusal and said in refusal, refusal


@pytest.mark.full
def test_the_verdicts_are_those_of_vllm_and_of_the_grammar():
    """vLLM's function refuses nothing that is accepted here. A schema that only this check refuses has a grammar with a
    text that jsonschema rejects, or that never ends."""
    import jsonschema
    import xgrammar
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    values = [None, True, 0, 1, 3, 5, 7, 9, 1.5, "", "a", "b", "aaaa", '"', [], [1], [1, 1], {}, {"a": 1}, {"a": 7}]
    values += ["2020-01-01", {"a": "x"}, {"b": 1}, {"a": 1, "b": 1}, {"x": 1}]
    texts = [*map(json.dumps, values), '"""', '"ab"']
    for schema, said in SCHEMAS:
        text = json.dumps(schema)
        try:
            validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json=text)))
        except Exception:
            assert said is not None, text
            continue
        grammar = xgrammar.Grammar.from_json_schema(text)
        taken = [t for t in texts if accepts(grammar, t)]
        if said is None:
            valid = jsonschema.Draft202012Validator(schema)
            assert all(valid.is_valid(json.loads(t)) for t in taken), text
        elif "end" not in said and "Ref" not in said and "$ref" not in said:
            assert any(t == '"""' or not _is_valid(schema, json.loads(t)) for t in taken), (text, taken)


def _is_valid(schema, value):
    import jsonschema

    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.full
@for_each(
    "request_",
    [
        {"regex": "|".join(f"word{i}" for i in range(90_000))},
        {"json": json.dumps({"enum": [f"w{i}" for i in range(60_000)]})},
    ],
)
def test_a_constraint_that_takes_too_long_is_named_and_the_next_one_is_tried(request_):
    trial, began = RequestTrial(cpu_seconds=2), time.process_time()
    assert "cannot be compiled within 2 s of CPU time" in (trial.refusal(request_) or "")
    assert trial.refusal({"regex": "a"}) is None and time.process_time() - began < 5
    process = trial._process
    trial.close()
    assert process is not None and process.returncode == -signal.SIGKILL


def test_a_process_that_is_killed_or_does_not_start_is_no_verdict(monkeypatch, tmp_path):
    """A child that answers as the real one does, but ends when it should answer."""
    child, count = tmp_path / "child.py", tmp_path / "count"
    monkeypatch.setattr("megagrpo.data.tokens.request_trial.CHILD", child)
    child.write_text(
        f"import os, pathlib, signal\ncount = pathlib.Path({str(count)!r})\nprint('null', flush=True)\ninput()\n"
        "if not count.exists():\n    count.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\nprint('[null, true]')"
    )
    trial = RequestTrial(wall_seconds=20)
    assert trial.refusal({"regex": "a"}) is None and trial.vllm_version == "" and trial._process is None
    child.write_text("import time\nprint('null', flush=True)\ntime.sleep(60)")
    assert "cannot be compiled" in str(RequestTrial(wall_seconds=0.3).refusal({"regex": "a"}))
    child.write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match=r"did not start \(exit code 3\)"):
        RequestTrial().refusal({"regex": "a"})


@pytest.mark.full
def test_a_vllm_whose_packages_cannot_be_skipped_is_imported_whole(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    monkeypatch.setattr("megagrpo.data.tokens.request_trial.CHILD", child)
    child.write_text(
        "from megagrpo.sync.vllm_side.trial import request_trial_child as real\n"
        "real.SKIPPED = ('vllm.config',)\nreal.main()"
    )
    trial = RequestTrial()
    assert "vLLM reads it as a Lark grammar" in str(trial.refusal({"grammar": '# ::=\nstart: "a"'}))
    assert trial.refusal({"regex": "a"}) is None and trial.vllm_version
    trial.close()


@for_each(
    ("overrides", "problems"),
    [
        (("rollout.structured_outputs.regex='[a'",), ["rollout.structured_outputs: xgrammar cannot compile the regex"]),
        (("rollout.allowed_token_ids=[3,95]", "rollout.stop=[x]"), ["rollout.allowed_token_ids: token 95 is not in"]),
        (("rollout.allowed_token_ids=[3]",), ["rollout.allowed_token_ids: names no end token, so every response"]),
        (("rollout.allowed_token_ids=[3]", "rollout.stop=[x]"), []),
        (("rollout.allowed_token_ids=[3,94]", "rollout.logit_bias.94=1"), []),
        (
            ("rollout.logit_bias.200000=1", "rollout.structured_outputs.json.type=str"),
            ["rollout.logit_bias: token 200000 is not in the model's vocabulary of 95", "Unsupported type"],
        ),
    ],
)
def test_parameters_of_the_run_are_tried(overrides, problems, tokenizer):  # noqa: F811
    try:
        RowReader(run(*overrides), tokenizer, 95).check_run()
    except ValueError as error:
        said = str(error).split("\n")
    else:
        said = []
    assert len(said) == len(problems) and all(map(str.__contains__, said, problems)), said


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.full
def test_tools_and_their_parser_are_tried_as_a_server_does(tokenizer, tmp_path):  # noqa: F811
    tokenizer.tokenizer.save_pretrained(tmp_path)

    def refusal(parser, *tools):
        return shared_trial().refusal({"parser": parser, "tools": tools, "tokenizer": str(tmp_path)})

    assert refusal("pythonic", TOOL) is None
    assert "Tool parser 'nonsense' not found" in str(refusal("nonsense", TOOL))
    assert "tools.0.function.name" in str(refusal("pythonic", {"type": "function", "function": {}}))
    assert "tools.1.function" in str(refusal("pythonic", TOOL, {"name": "f"}))
    assert "tools.0.function.parameters" in str(refusal("pythonic", {"function": {"name": "f", "parameters": [1]}}))
    assert Path(tmp_path, "tokenizer.json").exists()
