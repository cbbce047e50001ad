//! Schemas that are refused, arguments that are refused, and what is said of them.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

fn arguments(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is not an object"),
    }
}

fn refused(schema: Value, value: Value) -> String {
    ArgumentSchema::compile(&schema).unwrap().check(&arguments(value)).unwrap_err()
}

#[test]
fn errors_name_the_path_what_was_expected_and_what_was_got() {
    let schema = json!({"type": "object", "properties": {
        "flags": {"type": "array", "items": {"type": "string"}},
        "mode": {"enum": ["fast", "slow"]},
        "count": {"type": "integer", "minimum": 1},
        "odd name": {"type": ["string", "null"]},
        "kind": {"const": "a"},
    }});
    for (value, expected) in [
        (json!({"flags": [3]}), "$.flags[0]: expected string, got integer 3"),
        (json!({"flags": "x"}), "$.flags: expected array, got string \"x\""),
        (json!({"mode": "fsat"}), "$.mode: expected one of \"fast\", \"slow\", got string \"fsat\""),
        (json!({"count": 0}), "$.count: the value is less than the minimum of 1; got integer 0"),
        (json!({"count": 1.5}), "$.count: expected integer, got number 1.5"),
        (
            json!({"odd name": {"a": 1}}),
            "$[\"odd name\"]: expected null or string, got an object with the properties [a]",
        ),
        (json!({"kind": "b"}), "$.kind: expected \"a\", got string \"b\""),
    ] {
        assert_eq!(refused(schema.clone(), value), expected);
    }
}

#[test]
fn unknown_and_missing_properties_name_those_that_exist() {
    let schema = json!({"type": "object", "required": ["path"], "additionalProperties": false, "properties": {
        "path": {"type": "string"}, "start_line": {"type": "integer"},
        "inner": {"type": "object", "additionalProperties": false},
    }});
    assert_eq!(
        refused(schema.clone(), json!({"paht": "a"})),
        "$: unknown property `paht` (did you mean `path`?); allowed: inner, path, start_line\n\
         $: the property \"path\" is required and missing; allowed: inner, path, start_line"
    );
    assert_eq!(
        refused(schema, json!({"path": "a", "inner": {"x": 1}})),
        "$.inner: nothing is allowed here; leave it out"
    );
    let deep = json!({"type": "object", "properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
        "$defs": {"item": {"type": "object", "properties": {"name": {}}, "additionalProperties": false}}});
    assert_eq!(
        refused(deep, json!({"list": [{"name": 1}, {"nam": 1}]})),
        "$.list[1]: unknown property `nam` (did you mean `name`?); allowed: name"
    );
}

#[test]
fn errors_are_bounded_in_number_and_size() {
    let schema = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    let many: Map<String, Value> = (0..500).map(|index| (format!("k{index:03}"), json!("x".repeat(5_000)))).collect();
    let text = ArgumentSchema::compile(&schema).unwrap().check(&many).unwrap_err();
    assert_eq!(text.lines().count(), 9, "{text}");
    assert!(text.ends_with("… and more"), "{text}");
    assert!(text.len() < 2_000, "{text}");
}

#[test]
fn choices_tell_why_each_form_does_not_fit() {
    let schema = json!({"type": "object", "properties": {"at": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}}});
    assert_eq!(
        refused(schema, json!({"at": "today"})),
        "$.at: got string \"today\", which fits none of the 2 allowed forms; form 1: $.at: expected integer, got string \"today\"; \
         form 2: $.at: the value is longer than 3 characters; got string \"today\""
    );
}

#[test]
fn schemas_that_cannot_be_used_are_refused_with_the_reason() {
    let object = |extra: Value| {
        let mut schema = arguments(json!({"type": "object"}));
        schema.extend(arguments(extra));
        Value::Object(schema)
    };
    let nested = (0..MAX_DEPTH).fold(json!({}), |inner, _| json!({"items": inner}));
    let wide: Map<String, Value> = (0..MAX_SCHEMA_NODES).map(|index| (format!("p{index}"), json!({}))).collect();
    for (schema, reason) in [
        (json!({}), "has no `type`"),
        (json!(true), "has boolean true"),
        (json!({"type": "array"}), "`\"type\": \"array\"`"),
        (json!({"type": ["object", "null"]}), "`\"type\": [\"object\",\"null\"]`"),
        (object(json!({"properties": {"a": {"type": "strnig"}}})), "`$.properties.a.type`"),
        (object(json!({"properties": 3})), "`$.properties`"),
        (object(json!({"required": "a"})), "`$.required`"),
        (object(json!({"properties": {"a": {"$ref": "http://169.254.169.254/s.json"}}})), "outside of the schema"),
        (object(json!({"properties": {"a": {"$ref": "file:///etc/passwd"}}})), "outside of the schema"),
        (object(json!({"$schema": "https://example.com/meta"})), ""),
        (object(json!({"$ref": "#/$defs/none"})), "none"),
        (object(json!({"properties": {"a": {"pattern": "(?=x)"}}})), "regex"),
        (object(json!({"properties": {"a": {"pattern": "(a)\\1"}}})), "regex"),
        (object(json!({"properties": {"a": {"pattern": "("}}})), "regex"),
        (object(json!({"properties": {"a": {"pattern": "(a{1000}){1000}"}}})), "regex"),
        (object(json!({"properties": {"a": nested}})), "too large"),
        (object(json!({"properties": wide})), "too large"),
    ] {
        match ArgumentSchema::compile(&schema) {
            Err(error) => assert!(error.to_string().contains(reason), "{schema}: {error}"),
            Ok(_) => assert!(reason.is_empty(), "{schema} was accepted"),
        }
    }
}

#[test]
fn recursive_schemas_are_checked_and_bounded() {
    let tree = json!({"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}});
    let schema = ArgumentSchema::compile(&tree).unwrap();
    assert_eq!(schema.check(&arguments(json!({"children": [{"children": []}]}))), Ok(()));
    assert_eq!(
        schema.check(&arguments(json!({"children": [{"children": [1]}]}))).unwrap_err(),
        "$.children[0].children[0]: expected object, got integer 1"
    );
    let deep = (0..MAX_DEPTH).fold(json!({}), |inner, _| json!({"children": [inner]}));
    assert!(schema.check(&arguments(deep)).unwrap_err().starts_with("$: at most 64 levels"));

    let cycle = json!({"type": "object", "allOf": [{"$ref": "#"}], "required": ["a"]});
    let schema = ArgumentSchema::compile(&cycle).unwrap();
    assert_eq!(schema.check(&arguments(json!({"a": 1}))), Ok(()));
    assert!(schema.check(&Map::new()).is_err());
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the real cost of a check is what is tested")]
fn hostile_schemas_and_arguments_are_checked_in_bounded_time() {
    let started = Instant::now();
    for pattern in ["(a+)+$", "^(a|aa)+$", "(a|a)*b", "(.*a){20}$", "^(([a-z])+.)+[A-Z]([a-z])+$"] {
        let schema = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}});
        let schema = ArgumentSchema::compile(&schema).unwrap();
        assert!(schema.check(&arguments(json!({"a": format!("{}!", "a".repeat(100_000))}))).is_err(), "{pattern}");
    }

    // Each level refers twice to the next: 2^40 visits when nothing is remembered.
    let mut definitions = Map::new();
    for level in 0..40 {
        let next = json!({"$ref": format!("#/$defs/l{}", level + 1)});
        definitions.insert(format!("l{level}"), json!({"allOf": [next, next]}));
    }
    definitions.insert("l40".to_owned(), json!({"type": "integer"}));
    let bomb = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/l0"}}, "$defs": definitions});
    assert!(matches!(ArgumentSchema::compile(&bomb), Err(SchemaError::TooLarge)));

    // Two forms that both lead to the same child: 2^60 visits when nothing is remembered.
    let form = |kind: &str| json!({"properties": {"kind": {"const": kind}, "child": {"$ref": "#/$defs/node"}}, "required": ["kind"]});
    let twice = json!({"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"anyOf": [form("a"), form("b")], "allOf": [form("b"), form("b")]}}});
    let schema = ArgumentSchema::compile(&twice).unwrap();
    let nest = |leaf: &str| (0..60).fold(json!({"kind": leaf}), |inner, _| json!({"kind": "b", "child": inner}));
    assert_eq!(schema.check(&arguments(json!({"child": nest("b")}))), Ok(()));
    assert!(schema.check(&arguments(json!({"child": nest("c")}))).unwrap_err().contains("nested too deep"));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}
