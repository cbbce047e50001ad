//! The API description: complete, valid, and the same as the file.

use std::collections::HashSet;

use serde_json::Value;

use super::*;

fn document() -> Value {
    serde_json::to_value(openapi()).unwrap()
}

fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut out = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            out.push((path.clone(), method.clone(), operation.clone()));
        }
    }
    out
}

fn references(value: &Value, out: &mut HashSet<String>) {
    match value {
        Value::Object(object) => {
            out.extend(object.get("$ref").and_then(Value::as_str).map(str::to_owned));
            object.values().for_each(|value| references(value, out));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, out)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn the_file_is_what_the_code_says() {
    let file = include_str!("../../openapi.yaml");
    assert!(
        file == openapi_yaml().unwrap(),
        "openapi.yaml is stale; write it anew with: cargo run -- openapi > openapi.yaml"
    );
}

#[test]
fn every_operation_has_a_name_words_and_problems() {
    let document = document();
    assert_eq!(document["openapi"], "3.1.0");
    let mut names = HashSet::new();
    for (path, method, operation) in operations(&document) {
        let at = format!("{method} {path}");
        assert!(names.insert(operation["operationId"].as_str().unwrap().to_owned()), "{at}: its name is taken");
        for field in ["summary", "description"] {
            assert!(operation[field].as_str().is_some_and(|text| text.len() > 8), "{at}: {field}");
        }
        assert_eq!(operation["tags"].as_array().unwrap().len(), 1, "{at}");
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            assert!(parameter["description"].is_string(), "{at}: {}", parameter["name"]);
        }
        let responses = operation["responses"].as_object().unwrap();
        for status in ["400", "403", "431", "500", "503"] {
            assert!(responses.contains_key(status), "{at}: {status}");
        }
        for (status, response) in responses {
            let response = match response["$ref"].as_str() {
                Some(reference) => document.pointer(reference.trim_start_matches('#')).unwrap(),
                None => response,
            };
            assert!(response["description"].as_str().is_some_and(|text| !text.is_empty()), "{at} {status}");
            if status.starts_with(['4', '5']) {
                let schema = &response["content"][PROBLEM_JSON]["schema"]["$ref"];
                assert_eq!(schema, "#/components/schemas/Problem", "{at} {status}");
            }
        }
    }
    let run_routes = operations(&document).into_iter().filter(|(path, ..)| path.contains("{id}"));
    for (path, method, operation) in run_routes {
        assert!(operation["responses"]["404"].is_object(), "{method} {path}");
    }
}

#[test]
fn every_reference_leads_somewhere_and_every_schema_is_one() {
    let document = document();
    let mut found = HashSet::new();
    references(&document, &mut found);
    for reference in &found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
    let schemas = document["components"]["schemas"].as_object().unwrap();
    // OpenAPI 3.1 cannot say what the frames of a stream carry; the words of the operation do.
    let stream = &document["paths"]["/runs/{id}/events"]["get"]["description"];
    for (name, schema) in schemas {
        let told = name == "StreamData" && stream.as_str().unwrap().contains("`StreamData`");
        assert!(told || found.contains(&format!("#/components/schemas/{name}")), "{name} is used nowhere");
        jsonschema::meta::validate(schema).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn each_kind_of_event_has_a_schema_that_its_type_leads_to() {
    let document = document();
    let body = &document["components"]["schemas"]["EventBody"];
    let mapping = body["discriminator"]["mapping"].as_object().unwrap();
    assert_eq!((&body["discriminator"]["propertyName"], mapping.len()), (&"type".into(), EventKind::ALL.len()));
    let items: Vec<_> = body["oneOf"].as_array().unwrap().iter().map(|item| &item["$ref"]).collect();
    for (kind, item) in EventKind::ALL.into_iter().zip(items) {
        assert_eq!(&mapping[kind.as_str()], item);
        let schema = document.pointer(item.as_str().unwrap().trim_start_matches('#')).unwrap();
        assert_eq!(schema["properties"]["type"]["enum"], serde_json::json!([kind.as_str()]));
    }
    assert_eq!(mapping["tool_start"], "#/components/schemas/ToolStartEvent");
}

#[test]
fn the_description_says_that_there_are_no_keys() {
    assert_eq!(document()["security"], serde_json::json!([]));
}

#[test]
fn the_pattern_of_cursors_takes_every_id_that_streams_send() {
    use crate::event::Cursor;

    let document = document();
    let parameters = document["paths"]["/runs/{id}/events"]["get"]["parameters"].as_array().unwrap().clone();
    for name in ["after", "Last-Event-ID"] {
        let parameter = parameters.iter().find(|parameter| parameter["name"] == name).unwrap();
        let pattern = parameter["schema"]["pattern"].as_str().unwrap();
        let pattern = regex::Regex::new(pattern).unwrap();
        for id in [Cursor::START, Cursor::after(u64::MAX), Cursor::in_text(7, 340), Cursor::in_reasoning(7, 0, 12)] {
            assert!(pattern.is_match(&id.to_string()), "{name}: {id}");
        }
        for bad in ["", "-1", "1.", ".1", "1..2", "1.2.3.4", "1 ", "x"] {
            assert!(!pattern.is_match(bad) && bad.parse::<Cursor>().is_err(), "{name}: {bad}");
        }
    }
}
