//! The providers of a server, by name, ready to be called.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;

use super::http::{HttpProvider, HttpSettings, SetupError};
use super::openai_chat::{OpenAiChat, ReasoningField};
use super::scripted::{ScriptError, ScriptedProvider};
use super::{Provider, retry};
use crate::config::{ProviderConfig, ProviderKind};
use crate::time::Clock;

/// What a server offers.
#[derive(Clone, Default)]
pub struct Catalog {
    endpoints: BTreeMap<String, Endpoint>,
}

/// A provider and what is known of it.
#[derive(Clone)]
pub struct Endpoint {
    /// The provider.
    pub provider: Arc<dyn Provider>,
    /// Which wire it speaks.
    pub kind: ProviderKind,
    /// Tokens a request and its answer may have together.
    pub context_window: u64,
    /// Most tokens of an answer, if bounded.
    pub max_output_tokens: Option<u32>,
    /// When to try again.
    pub retry: retry::Policy,
    /// Models to show; others can be used as well.
    pub models: Vec<String>,
}

impl Endpoint {
    /// An endpoint of a program's own: 128 000 tokens of context, two retries, no models shown.
    pub fn new(provider: Arc<dyn Provider>, kind: ProviderKind) -> Self {
        Self {
            provider,
            kind,
            context_window: 128_000,
            max_output_tokens: None,
            retry: retry::Policy::default(),
            models: Vec::new(),
        }
    }
}

/// A `[providers.NAME]` section cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// A key is missing that this kind needs.
    #[error("providers.{provider}: `{key}` is missing; a provider of this kind needs {need}")]
    Missing {
        /// The section's name.
        provider: String,
        /// The key.
        key: &'static str,
        /// What it is for.
        need: &'static str,
    },
    /// The URL is not one.
    #[error("providers.{provider}: `base_url` is not a URL such as https://api.example/v1: {reason}")]
    BaseUrl {
        /// The section's name.
        provider: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No such field on the wire.
    #[error(
        "providers.{provider}: `reasoning_field` is `{value}`; \
         expected `reasoning_content`, `reasoning` or `reasoning_details`"
    )]
    ReasoningField {
        /// The section's name.
        provider: String,
        /// What it says.
        value: String,
    },
    /// The script cannot be played.
    #[error("providers.{provider}: {source}")]
    Script {
        /// The section's name.
        provider: String,
        /// Why.
        source: ScriptError,
    },
    /// The client cannot be set up.
    #[error("providers.{provider}: {source}")]
    Setup {
        /// The section's name.
        provider: String,
        /// Why.
        source: SetupError,
    },
}

impl Catalog {
    /// Sets up every configured provider; connects to none. Scripts are read here.
    pub fn new(providers: &BTreeMap<String, ProviderConfig>, clock: &Arc<dyn Clock>) -> Result<Self, CatalogError> {
        let mut catalog = Self::default();
        for (name, config) in providers {
            let provider: Arc<dyn Provider> = match config.kind {
                ProviderKind::OpenaiChat => {
                    let wire = OpenAiChat::new(reasoning_field(name, config)?);
                    let provider = HttpProvider::new(wire, http_settings(name, config)?, Arc::clone(clock))
                        .map_err(|source| CatalogError::Setup { provider: name.clone(), source })?;
                    Arc::new(provider)
                }
                ProviderKind::Scripted => {
                    let path = config.script.as_ref().ok_or_else(|| CatalogError::Missing {
                        provider: name.clone(),
                        key: "script",
                        need: "the file it plays",
                    })?;
                    let provider = ScriptedProvider::from_file(path)
                        .map_err(|source| CatalogError::Script { provider: name.clone(), source })?;
                    Arc::new(provider)
                }
            };
            catalog.insert(
                name,
                Endpoint {
                    context_window: config.context_window,
                    max_output_tokens: config.max_output_tokens,
                    retry: retry::Policy::new(config.max_retries),
                    models: config.models.clone(),
                    ..Endpoint::new(provider, config.kind)
                },
            );
        }
        Ok(catalog)
    }

    /// Adds a provider, or replaces the one of that name.
    pub fn insert(&mut self, name: impl Into<String>, endpoint: Endpoint) {
        self.endpoints.insert(name.into(), endpoint);
    }

    /// The provider of that name.
    pub fn get(&self, provider: &str) -> Option<&Endpoint> {
        self.endpoints.get(provider)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Endpoint)> {
        self.endpoints.iter().map(|(name, endpoint)| (name.as_str(), endpoint))
    }
}

fn reasoning_field(name: &str, config: &ProviderConfig) -> Result<Option<ReasoningField>, CatalogError> {
    let Some(value) = &config.reasoning_field else { return Ok(None) };
    match ReasoningField::ALL.into_iter().find(|field| field.as_str() == value) {
        Some(field) => Ok(Some(field)),
        None => Err(CatalogError::ReasoningField { provider: name.to_owned(), value: value.clone() }),
    }
}

fn http_settings(name: &str, config: &ProviderConfig) -> Result<HttpSettings, CatalogError> {
    let text = config.base_url.as_ref().ok_or_else(|| CatalogError::Missing {
        provider: name.to_owned(),
        key: "base_url",
        need: "the address of its server, with the version",
    })?;
    let invalid = |reason: String| CatalogError::BaseUrl { provider: name.to_owned(), reason };
    let base_url = Url::parse(text).map_err(|error| invalid(error.to_string()))?;
    if !matches!(base_url.scheme(), "http" | "https") {
        return Err(invalid(format!("its scheme is `{}`, only http and https are spoken", base_url.scheme())));
    }
    if !base_url.username().is_empty() || base_url.password().is_some() {
        return Err(invalid(
            "it holds a user name or password; put the key into a variable and name it in `api_key_env`".into(),
        ));
    }
    Ok(HttpSettings {
        base_url,
        api_key: config.api_key.clone(),
        connect_timeout: Duration::from_millis(config.connect_timeout_ms),
        idle_timeout: Duration::from_millis(config.idle_timeout_ms),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::SystemClock;

    fn catalog(toml: serde_json::Value) -> Result<Catalog, String> {
        let providers = serde_json::from_value(toml).unwrap();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        Catalog::new(&providers, &clock).map_err(|error| error.to_string())
    }

    #[test]
    fn sections_become_endpoints() {
        let catalog = catalog(serde_json::json!({
            "local": {"kind": "openai_chat", "base_url": "http://127.0.0.1:8000/v1", "models": ["m"], "max_retries": 5, "max_output_tokens": 9},
        }))
        .unwrap();
        let endpoint = catalog.get("local").unwrap();
        assert_eq!(
            (
                endpoint.context_window,
                endpoint.max_output_tokens,
                endpoint.retry,
                endpoint.models.as_slice(),
                endpoint.kind
            ),
            (128_000, Some(9), retry::Policy::new(5), ["m".to_owned()].as_slice(), ProviderKind::OpenaiChat)
        );
        assert_eq!(catalog.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["local"]);
        assert!(catalog.get("other").is_none());
    }

    #[test]
    fn unusable_sections_are_named_with_what_is_wrong() {
        for (section, expected) in [
            (serde_json::json!({"kind": "openai_chat"}), "providers.p: `base_url` is missing"),
            (serde_json::json!({"kind": "scripted"}), "providers.p: `script` is missing"),
            (
                serde_json::json!({"kind": "scripted", "script": "/no/such/file"}),
                "providers.p: the script /no/such/file",
            ),
            (serde_json::json!({"kind": "openai_chat", "base_url": "localhost"}), "`base_url` is not a URL"),
            (serde_json::json!({"kind": "openai_chat", "base_url": "ftp://h/v1"}), "its scheme is `ftp`"),
            (
                serde_json::json!({"kind": "openai_chat", "base_url": "http://u:secret@h/v1"}),
                "it holds a user name or password",
            ),
            (
                serde_json::json!({"kind": "openai_chat", "base_url": "http://h/v1", "reasoning_field": "thoughts"}),
                "`reasoning_field` is `thoughts`",
            ),
        ] {
            let error = catalog(serde_json::json!({"p": section})).err().unwrap();
            assert!(error.contains(expected) && !error.contains("secret"), "{error}");
        }
    }
}
