//! Requests against one agent: defaults, what may be narrowed, every problem named.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::config::{AgentConfig, Config, ProviderConfig, WorkspaceConfig};
use crate::time::{Clock, SystemClock};
use crate::tool::files::file_tools;

struct World {
    agents: Agents,
    registry: Registry,
    catalog: Catalog,
    config: Config,
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn world(directory: &std::path::Path) -> World {
    let provider: ProviderConfig = read(json!({"kind": "openai_chat", "base_url": "http://127.0.0.1:1/v1",
        "context_window": 1000, "max_output_tokens": 100}));
    let agent: AgentConfig = read(json!({"model": "p/one", "models": ["p/two"], "instructions": "be brief",
        "tools": ["read_file", "list_dir"], "workspace": "repo", "workspaces": ["other"]}));
    let workspace: WorkspaceConfig = read(json!({"path": directory}));
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let catalog = Catalog::new(&BTreeMap::from([("p".to_owned(), provider)]), &clock).unwrap();
    let registry = Registry::new(file_tools()).unwrap();
    let workspaces = ["repo", "other", "secret"].map(|name| (name.to_owned(), workspace.clone()));
    let agents = Agents::new(
        "default",
        &BTreeMap::from([("coder".to_owned(), agent)]),
        &BTreeMap::from(workspaces),
        &registry,
        &catalog,
    )
    .unwrap();
    World { agents, registry, catalog, config: Config::default() }
}

impl World {
    fn resolve(&self, request: Value) -> Result<RunSpec, Vec<FieldError>> {
        let World { agents, registry, catalog, config } = self;
        let resolved = resolve(read(request), None, agents, registry, catalog, &config.run, &config.limits);
        resolved.map(|resolved| resolved.spec)
    }

    /// The paths of what is wrong.
    fn wrong(&self, request: Value) -> Vec<String> {
        self.resolve(request).unwrap_err().into_iter().map(|error| error.path).collect()
    }
}

#[test]
fn only_the_input_is_needed() {
    let directory = tempfile::tempdir().unwrap();
    let spec = world(directory.path()).resolve(json!({"input": "hi"})).unwrap();
    assert_eq!(
        serde_json::to_value(&spec).unwrap(),
        json!({
            "agent": "coder", "input": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "instructions": "be brief", "model": "p/one", "max_output_tokens": 100,
            "tools": ["read_file", "list_dir"],
            "limits": {"max_steps": 10, "max_tool_calls": 30, "max_tokens": 50000, "timeout_ms": 300000,
                       "model_timeout_ms": 60000, "tool_timeout_ms": 30000,
                       "wait_timeout_ms": 86400000},
            "context": {"strategy": "trim", "max_tokens": 900, "max_tool_result_chars": 8000},
            "on_repeat": "warn", "repeat_limit": 4, "parallel_tools": "read_only", "workspace": "repo", "metadata": {}
        })
    );
}

#[test]
fn a_caller_narrows() {
    let directory = tempfile::tempdir().unwrap();
    let spec = world(directory.path())
        .resolve(json!({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                                  {"role": "user", "content": [{"type": "text", "text": "c"}]}],
            "agent": "coder", "instructions": "be long", "model": "p/two", "tools": ["list_*"], "workspace": "other",
            "limits": {"max_steps": 1, "max_tool_calls": 0}, "context": {"max_tokens": 500},
            "metadata": {"ticket": "7"}}))
        .unwrap();
    assert_eq!((spec.input.len(), spec.model.model.as_str(), spec.tools.len()), (3, "two", 1));
    assert_eq!((spec.limits.max_steps, spec.limits.max_tool_calls, spec.context.max_tokens), (1, 0, 500));
    assert_eq!((spec.instructions.as_deref(), spec.workspace.as_deref()), (Some("be long"), Some("other")));
}

#[test]
fn every_problem_is_named_with_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let world = world(directory.path());
    let request = json!({"input": " ", "tools": ["write_file", "nonsense"], "workspace": "secret",
        "limits": {"max_steps": 0, "max_tokens": 2_000_001, "timeout_ms": 3_600_001},
        "context": {"max_tokens": 901, "max_tool_result_chars": 5}, "instructions": "a\u{0}b",
        "metadata": {"": "x", "k": "v".repeat(513)}});
    assert_eq!(
        world.wrong(request),
        [
            "$.input",
            "$.limits.max_steps",
            "$.limits.max_tokens",
            "$.limits.timeout_ms",
            "$.metadata.",
            "$.metadata.k",
            "$.instructions",
            "$.tools[0]",
            "$.tools[1]",
            "$.workspace",
            "$.context.max_tokens",
            "$.context.max_tool_result_chars"
        ]
    );
    let errors = world.resolve(json!({"input": "x", "limits": {"max_steps": 201}})).unwrap_err();
    assert_eq!(errors[0].message, "201 is above the server's ceiling of 200");
    let errors = world.resolve(json!({"input": "x", "workspace": "secret"})).unwrap_err();
    assert_eq!(errors[0].message, "agent `coder` does not allow the workspace `secret`; it allows `repo`, `other`");
}

#[test]
fn input_has_to_be_something_to_answer() {
    let directory = tempfile::tempdir().unwrap();
    let world = world(directory.path());
    assert_eq!(world.wrong(json!({"input": "x", "model": "p/three"})), ["$.model"]);
    for (input, path) in [
        (json!([]), "$.input"),
        (json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]), "$.input"),
        (json!([{"role": "user", "content": []}]), "$.input[0].content"),
        (json!([{"role": "user", "content": "a\u{0}"}]), "$.input[0].content"),
    ] {
        assert_eq!(world.wrong(json!({"input": input})), [path]);
    }
    assert_eq!(world.wrong(json!({"input": "x", "agent": "nobody"})), ["$.agent"]);
    assert_eq!(world.wrong(json!({"input": "x", "tools": vec!["read_*"; 129]})), ["$.tools"]);
}
