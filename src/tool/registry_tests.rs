//! Registration, selection and checks of calls.

use serde_json::json;

use super::super::fake::FakeTool;
use super::*;
use crate::domain::Effect;

fn registry(names: &[&str]) -> Registry {
    let tools = names.iter().map(|name| FakeTool::tool(name, Effect::ReadOnly, |_| async { Ok(String::new()) }));
    Registry::new(tools.collect()).unwrap()
}

fn names(chosen: Vec<ToolName>) -> Vec<String> {
    chosen.iter().map(ToString::to_string).collect()
}

fn patterns(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn duplicates_and_bad_schemas_are_refused() {
    let tool = |name: &str| FakeTool::tool(name, Effect::ReadOnly, |_| async { Ok(String::new()) });
    let error = Registry::new(vec![tool("a"), tool("b"), tool("a")]).unwrap_err();
    assert_eq!(error.to_string(), "two tools are named `a`; names must be unique");
    let bad = FakeTool::with_parameters("bad", Effect::ReadOnly, json!({}), |_| async { Ok(String::new()) });
    assert_eq!(
        Registry::new(vec![bad]).unwrap_err().to_string(),
        "the tool `bad` cannot be used: the schema must be an object with `\"type\": \"object\"` at its top level, \
         but has no `type`"
    );
}

#[test]
fn selection_is_by_name_or_pattern_in_the_order_of_the_registry() {
    let registry = registry(&["write_file", "read_file", "mcp.github.search", "mcp.github/x", "mcp.jira.search"]);
    for (given, expected) in [
        (&[][..], &[][..]),
        (&["read_file", "write_file"], &["write_file", "read_file"]),
        (&["mcp.github*", "mcp.github.search"], &["mcp.github.search", "mcp.github/x"]),
        (&["*.search", "read_*"], &["read_file", "mcp.github.search", "mcp.jira.search"]),
        (&["*"], &["write_file", "read_file", "mcp.github.search", "mcp.github/x", "mcp.jira.search"]),
    ] {
        assert_eq!(names(registry.select(&patterns(given)).unwrap()), expected, "{given:?}");
    }
    assert_eq!(registry.iter().map(|tool| tool.name().as_str()).next(), Some("write_file"));
}

#[test]
fn a_selection_of_nothing_is_an_error_that_names_what_is_near() {
    let registry = registry(&["read_file", "write_file"]);
    assert_eq!(
        registry.select(&patterns(&["read_file", "raed_file"])).unwrap_err().to_string(),
        "no tool is named `raed_file`; did you mean `read_file`?; available: read_file, write_file"
    );
    assert_eq!(
        registry.select(&patterns(&["zzz.*"])).unwrap_err().to_string(),
        "no tool is named `zzz.*`; available: read_file, write_file"
    );
    assert!(matches!(registry.select(&patterns(&["a["])), Err(UnknownTool::BadPattern { .. })));
    assert!(registry.select(&patterns(&[""])).is_err());
    let long = registry.select(&["{a,b}".repeat(1_000)]).unwrap_err();
    assert!(matches!(&long, UnknownTool::BadPattern { reason, .. } if reason.contains("5000 bytes")), "{long}");
    assert!(long.to_string().len() < 400, "{long}");
}

#[test]
fn a_call_is_checked_against_name_form_and_schema() {
    let registry = registry(&["read_file", "write_file"]);
    assert_eq!(registry.check("read_file", &Arguments::parse(r#"{"n":1}"#)).unwrap().name().as_str(), "read_file");
    for (name, arguments, expected) in [
        (
            "readfile",
            "{}",
            "No tool is named `readfile`; did you mean `read_file`?; available: read_file, write_file. Nothing was executed.",
        ),
        ("x\ny", "{}", "No tool is named `x\\ny`; available: read_file, write_file. Nothing was executed."),
        (
            "read_file",
            "[1,\n2]",
            "The arguments of `read_file` must be one JSON object, and it was not executed. Got 6 characters: `[1,\\n2]`",
        ),
        (
            "read_file",
            r#"{"n":"1"}"#,
            "The arguments of `read_file` do not fit its schema, and it was not executed. Correct them and call it \
             again.\n$.n: expected integer, got string \"1\"",
        ),
    ] {
        assert_eq!(registry.check(name, &Arguments::parse(arguments)).unwrap_err(), expected);
    }
    let long = registry.check("read_file", &Arguments::Malformed("[".repeat(1_000_000))).unwrap_err();
    assert!(long.len() < 400 && long.contains("1000000 characters"), "{long}");
}

#[test]
fn a_tool_that_is_not_offered_does_not_exist() {
    let registry = registry(&["read_file", "write_file"]);
    let offered = registry.select(&patterns(&["read_file"])).unwrap();
    assert!(registry.check_offered(&offered, "read_file", &Arguments::parse("")).is_ok());
    assert_eq!(
        registry.check_offered(&offered, "write_file", &Arguments::parse("")).unwrap_err(),
        "No tool is named `write_file`; available: read_file. Nothing was executed."
    );
}
