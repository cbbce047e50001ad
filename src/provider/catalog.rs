//! The providers of a server, by name, ready to be called.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::http::{HttpProvider, HttpSettings, SetupError};
use super::openai_chat::OpenAiChat;
use super::scripted::{ScriptError, ScriptedProvider};
use super::{Provider, retry};
use crate::config::{DEFAULT_CONTEXT_WINDOW, OpenaiChatConfig, ProviderConfig, ProviderKind, WireConfig};
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
    /// The host and port that are asked; `None` for what is no server.
    pub address: Option<(String, u16)>,
}

impl Endpoint {
    /// An endpoint of a program's own, with the default settings and no models shown.
    pub fn new(provider: Arc<dyn Provider>, kind: ProviderKind) -> Self {
        Self {
            provider,
            kind,
            context_window: DEFAULT_CONTEXT_WINDOW,
            max_output_tokens: None,
            retry: retry::Policy::default(),
            models: Vec::new(),
            address: None,
        }
    }
}

/// A `[providers.NAME]` section cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
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
            let provider: Arc<dyn Provider> = match &config.wire {
                WireConfig::OpenaiChat(chat) => {
                    let wire = OpenAiChat::new(chat.reasoning_field);
                    let provider = HttpProvider::new(wire, http_settings(chat), Arc::clone(clock))
                        .map_err(|source| CatalogError::Setup { provider: name.clone(), source })?;
                    Arc::new(provider)
                }
                WireConfig::Scripted(script) => {
                    let provider = ScriptedProvider::load(script)
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
                    address: address(&config.wire),
                    ..Endpoint::new(provider, config.kind())
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

/// Where a provider is asked.
fn address(wire: &WireConfig) -> Option<(String, u16)> {
    match wire {
        WireConfig::OpenaiChat(chat) => {
            let url = chat.base_url.as_url();
            Some((url.host_str()?.to_owned(), url.port_or_known_default()?))
        }
        WireConfig::Scripted(_) => None,
    }
}

fn http_settings(config: &OpenaiChatConfig) -> HttpSettings {
    HttpSettings {
        base_url: config.base_url.as_url().clone(),
        api_key: config.api_key.clone(),
        connect_timeout: Duration::from_millis(config.connect_timeout_ms),
        idle_timeout: Duration::from_millis(config.idle_timeout_ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ScriptSource;
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
    fn a_script_that_cannot_be_played_is_named() {
        let error = catalog(serde_json::json!({"p": {"kind": "scripted", "script": "/no/such/file"}})).err().unwrap();
        assert!(error.starts_with("providers.p: the script /no/such/file cannot be read: "), "{error}");
    }

    #[test]
    fn the_demonstration_can_be_played() {
        let demo = ProviderConfig::new(WireConfig::Scripted(ScriptSource::Demo));
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let catalog = Catalog::new(&BTreeMap::from([("demo".to_owned(), demo)]), &clock).unwrap();
        assert_eq!(catalog.get("demo").unwrap().kind, ProviderKind::Scripted);
    }
}
