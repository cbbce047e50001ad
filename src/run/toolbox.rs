//! The tools of one run, as the machine sees them.

use std::sync::Arc;

use crate::agent::{Checked, Toolbox};
use crate::domain::{Arguments, ToolCall, ToolName, ToolSpec};
use crate::tool::executor::ReadyCall;
use crate::tool::registry::Registry;

/// The registry, narrowed to what a run was given.
pub(super) struct RunTools {
    registry: Arc<Registry>,
    allowed: Vec<ToolName>,
    specs: Arc<[ToolSpec]>,
}

impl RunTools {
    pub(super) fn new(registry: Arc<Registry>, allowed: Vec<ToolName>) -> Self {
        let specs = allowed
            .iter()
            .filter_map(|name| registry.get(name.as_str()))
            .map(|tool| tool.tool.spec().clone())
            .collect();
        Self { registry, allowed, specs }
    }

    /// What the model is told, in the order of the spec. A tool that is no longer configured is left out.
    pub(super) const fn specs(&self) -> &Arc<[ToolSpec]> {
        &self.specs
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
}

impl Toolbox for RunTools {
    fn check(&self, call: &ToolCall) -> Checked {
        match (self.registry.check_offered(&self.allowed, &call.name, &call.arguments), &call.arguments) {
            (Ok(registered), Arguments::Object(arguments)) => Checked::Ready {
                effect: registered.tool.effect(arguments),
                pollable: registered.tool.is_pollable(arguments),
            },
            (Ok(_), Arguments::Malformed(raw)) => Checked::Invalid(format!("`{raw}` is not a JSON object.")),
            (Err(problem), _) => Checked::Invalid(problem),
        }
    }
}
