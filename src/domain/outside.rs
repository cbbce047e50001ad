//! What callers ask of an active run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{LimitsPatch, TextOrParts};

/// The body of `PATCH /runs/{id}`: what is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct RunPatch {
    /// Higher limits.
    #[serde(default)]
    pub limits: LimitsPatch,
    /// All labels; those that are not named are removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
}

/// The body of `POST /runs/{id}/tool_results`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct ToolResults {
    /// Results, each of another pending call; at least one. They are taken together or not at all.
    #[schema(min_items = 1)]
    pub results: Vec<CallResult>,
}

/// What came of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct CallResult {
    /// The call.
    pub call_id: String,
    /// What the model reads.
    pub content: TextOrParts,
    /// Whether it failed.
    #[serde(default)]
    pub is_error: bool,
}

/// The body of `POST /runs/{id}/approvals`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct Approvals {
    /// Decisions, each on another pending call; at least one. They are taken together or not at all.
    #[schema(min_items = 1)]
    pub decisions: Vec<Approval>,
}

/// A decision on one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct Approval {
    /// The call.
    pub call_id: String,
    /// What to do with it.
    pub decision: Decision,
    /// What the model is told of a denied call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The arguments of an edited call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub arguments: Option<Map<String, Value>>,
}

/// What to do with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Run it.
    Approve,
    /// Do not.
    Deny,
    /// Run it with other arguments, which have to fit the tool's schema.
    Edit,
}

/// The body of `POST /runs/{id}/messages`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct SteeringMessage {
    /// What is said.
    pub content: TextOrParts,
}
