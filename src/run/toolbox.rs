//! The tools of one run, as the machine sees them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::agent::{Checked, Toolbox, estimate_tools};
use crate::domain::{Arguments, Effect, Gate, OnUnknown, RunSpec, ToolCall, ToolName, ToolSpec};
use crate::tool::executor::ReadyCall;
use crate::tool::registry::Registry;
use crate::tool::schema::ArgumentSchema;

/// How many lists of tools are remembered. Most runs have the list of their agent.
const MAX_SETS: usize = 32;

/// What the newest lists of tools come to: the same for every run, since the registry does not change.
#[derive(Default)]
pub(super) struct ToolSets(Mutex<Vec<Arc<ToolSet>>>);

/// A list of registered tools, as a model is told of them.
struct ToolSet {
    names: Vec<ToolName>,
    specs: Arc<[ToolSpec]>,
    /// About how many tokens the specs have.
    tokens: u64,
}

impl ToolSets {
    fn get(&self, registry: &Registry, names: &[ToolName]) -> Arc<ToolSet> {
        let mut sets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(set) = sets.iter().find(|set| set.names == names) {
            return Arc::clone(set);
        }
        let tools = names.iter().filter_map(|name| registry.get(name.as_str()));
        let specs: Arc<[ToolSpec]> = tools.map(|tool| tool.tool.spec().clone()).collect();
        let set = Arc::new(ToolSet { names: names.to_vec(), tokens: estimate_tools(&specs), specs });
        if sets.len() == MAX_SETS {
            sets.remove(0);
        }
        sets.push(Arc::clone(&set));
        set
    }
}

/// The registry, narrowed to what a run was given, and the tools that its caller executes.
pub(super) struct RunTools {
    registry: Arc<Registry>,
    allowed: Vec<ToolName>,
    approval: Vec<ToolName>,
    clients: Vec<ClientTool>,
    specs: Arc<[ToolSpec]>,
    tokens: u64,
}

/// A tool that the caller executes.
struct ClientTool {
    spec: ToolSpec,
    /// `None` when the schema, which was checked when the run was accepted, cannot be used by this version.
    schema: Option<ArgumentSchema>,
}

impl RunTools {
    pub(super) fn new(registry: Arc<Registry>, sets: &ToolSets, spec: &RunSpec) -> Self {
        let own = sets.get(&registry, &spec.tools);
        let specs = if spec.client_tools.is_empty() {
            Arc::clone(&own.specs)
        } else {
            own.specs.iter().chain(&spec.client_tools).cloned().collect()
        };
        let client = |spec: &ToolSpec| ClientTool {
            schema: ArgumentSchema::compile(&spec.parameters)
                .inspect_err(|error| tracing::warn!(tool = %spec.name, %error, "arguments cannot be checked"))
                .ok(),
            spec: spec.clone(),
        };
        Self {
            allowed: spec.tools.clone(),
            approval: spec.approval.clone(),
            clients: spec.client_tools.iter().map(client).collect(),
            registry,
            specs,
            tokens: own.tokens + estimate_tools(&spec.client_tools),
        }
    }

    /// What the model is told, in the order of the spec. A tool that is no longer configured is left out.
    pub(super) const fn specs(&self) -> &Arc<[ToolSpec]> {
        &self.specs
    }

    /// About how many tokens the specs have.
    pub(super) const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// A call the machine found valid, ready for the executor; `None` when its tool is gone or it is malformed.
    pub(super) fn ready(&self, call: ToolCall) -> Option<ReadyCall> {
        let registered = self.registry.get(&call.name)?;
        match call.arguments {
            Arguments::Object(arguments) => {
                Some(ReadyCall { id: call.id, tool: Arc::clone(&registered.tool), arguments })
            }
            Arguments::Malformed(_) => None,
        }
    }

    fn check_client(&self, tool: &ClientTool, call: &ToolCall) -> Checked {
        let name = &call.name;
        let problem = match (&call.arguments, &tool.schema) {
            (Arguments::Object(_), None) => None,
            (Arguments::Object(arguments), Some(schema)) => schema.check(arguments).err(),
            (Arguments::Malformed(_), _) => Some("they must be one JSON object".to_owned()),
        };
        match problem {
            // What the caller's tool can change is the caller's own affair; hames never runs it.
            None => Checked::Ready { effect: Effect::SideEffect, pollable: false, gate: Gate::Client },
            Some(problem) => Checked::Invalid(format!(
                "The arguments of `{name}` do not fit its schema, and it was not executed. Correct them and call it \
                 again.\n{problem}"
            )),
        }
    }
}

impl Toolbox for RunTools {
    fn check(&self, call: &ToolCall) -> Checked {
        if let Some(client) = self.clients.iter().find(|tool| tool.spec.name.as_str() == call.name) {
            return self.check_client(client, call);
        }
        match (self.registry.check_offered(&self.allowed, &call.name, &call.arguments), &call.arguments) {
            (Ok(registered), Arguments::Object(arguments)) => Checked::Ready {
                effect: registered.tool.effect(arguments),
                pollable: registered.tool.is_pollable(arguments),
                gate: if self.approval.contains(registered.name()) { Gate::Approval } else { Gate::Open },
            },
            (Ok(_), Arguments::Malformed(raw)) => Checked::Invalid(format!("`{raw}` is not a JSON object.")),
            (Err(problem), _) => Checked::Invalid(problem),
        }
    }

    fn on_unknown(&self, call: &ToolCall) -> OnUnknown {
        match (self.registry.get(&call.name), &call.arguments) {
            (Some(registered), Arguments::Object(arguments)) => registered.tool.on_unknown(arguments),
            (Some(_) | None, _) => OnUnknown::Tell,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::files::file_tools;

    #[test]
    fn a_list_of_tools_is_put_together_once_and_not_kept_for_ever() {
        let (sets, registry) = (ToolSets::default(), Registry::new(file_tools()).unwrap());
        let name = |name: &str| name.parse::<ToolName>().unwrap();
        let list = [name("read_file"), name("gone"), name("list_dir")];
        let set = sets.get(&registry, &list);
        let told: Vec<_> = set.specs.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!((told, set.tokens), (vec!["read_file", "list_dir"], estimate_tools(&set.specs)));
        assert!(Arc::ptr_eq(&set, &sets.get(&registry, &list)));
        assert_eq!(sets.get(&registry, &list[..1]).specs.len(), 1);
        (0..MAX_SETS).for_each(|number| drop(sets.get(&registry, &[name(&format!("t{number}"))])));
        assert_eq!(sets.0.lock().unwrap().len(), MAX_SETS);
        assert!(!Arc::ptr_eq(&set, &sets.get(&registry, &list)));
    }
}
