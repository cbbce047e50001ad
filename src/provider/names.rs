//! Tool names as a provider accepts them: a mapping that is one to one within a request and the same in each.

use std::collections::{BTreeMap, BTreeSet};

/// Longest name on the wire.
const MAX_LEN: usize = 64;

/// The names of one request. Names that fit `^[a-zA-Z0-9_-]{1,64}$` stay as they are; others are cleaned,
/// cut, and told apart by a hash of the whole name.
#[derive(Clone, Debug, Default)]
pub struct NameMap {
    to_wire: BTreeMap<String, String>,
    from_wire: BTreeMap<String, String>,
}

impl NameMap {
    /// Maps the names of the tools on offer.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        // Names that need no change are placed first, so that no changed one can take their place.
        let (plain, changed): (BTreeSet<&str>, BTreeSet<&str>) = names.into_iter().partition(|name| is_plain(name));
        let mut map = Self::default();
        for name in plain {
            map.insert(name, name.to_owned());
        }
        for name in changed {
            let mut wire = cleaned(name, 0);
            for salt in 1.. {
                if !map.from_wire.contains_key(&wire) {
                    break;
                }
                wire = cleaned(name, salt);
            }
            map.insert(name, wire);
        }
        map
    }

    /// The name on the wire. A name that is not on offer (the model made it up, or the tool is gone) is
    /// cleaned in the same way, since the provider checks names in old messages too.
    pub fn to_wire(&self, name: &str) -> String {
        match self.to_wire.get(name) {
            Some(wire) => wire.clone(),
            None if is_plain(name) => name.to_owned(),
            None => cleaned(name, 0),
        }
    }

    /// The name a model's call means; unchanged when it is not one of ours.
    pub fn from_wire<'a>(&'a self, wire: &'a str) -> &'a str {
        self.from_wire.get(wire).map_or(wire, String::as_str)
    }

    fn insert(&mut self, name: &str, wire: String) {
        self.from_wire.insert(wire.clone(), name.to_owned());
        self.to_wire.insert(name.to_owned(), wire);
    }
}

fn is_plain(name: &str) -> bool {
    (1..=MAX_LEN).contains(&name.len()) && name.bytes().all(is_plain_byte)
}

const fn is_plain_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

fn cleaned(name: &str, salt: u32) -> String {
    let suffix = format!("_{:08x}", hash(name, salt));
    let plain = |c: char| if u8::try_from(c).is_ok_and(is_plain_byte) { c } else { '_' };
    let kept: String = name.chars().map(plain).take(MAX_LEN - suffix.len()).collect();
    kept + &suffix
}

/// FNV-1a, folded to 32 bits: the same in every build, unlike the standard library's hasher.
fn hash(name: &str, salt: u32) -> u32 {
    let bytes = name.bytes().chain(salt.to_le_bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    (hash >> 32) as u32 ^ hash as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn plain_names_stay_and_others_are_told_apart() {
        let long = ["create", "delete"]
            .map(|verb| format!("mcp_atlassian_cloud_integration_server__{verb}_page_with_attachments"));
        let map = NameMap::new(["read_file", "fs.read/file", "fs/read.file", &long[0], &long[1]]);
        assert_eq!(map.to_wire("read_file"), "read_file");
        assert_eq!(map.to_wire("fs.read/file"), "fs_read_file_fb8738bd");
        assert_eq!(map.from_wire("fs_read_file_fb8738bd"), "fs.read/file");
        assert_ne!(map.to_wire(&long[0]), map.to_wire(&long[1]));
        assert_eq!(map.from_wire("unknown"), "unknown");
        assert_eq!(map.from_wire("fs.read/file"), "fs.read/file");
    }

    #[test]
    fn a_name_that_looks_like_a_changed_one_keeps_its_place() {
        let taken = NameMap::new(["a.b"]).to_wire("a.b");
        let map = NameMap::new(["a.b", taken.as_str()]);
        assert_eq!(map.to_wire(&taken), taken);
        assert_ne!(map.to_wire("a.b"), taken);
        assert_eq!(map.from_wire(&map.to_wire("a.b")), "a.b");
    }

    proptest! {
        #[test]
        fn the_mapping_is_valid_and_reversible(names in prop::collection::btree_set("[a-z./é_]{0,8}|[a-z.]{60,128}", 0..12)) {
            let map = NameMap::new(names.iter().map(String::as_str));
            for name in &names {
                let wire = map.to_wire(name);
                prop_assert!(is_plain(&wire), "{}", wire);
                prop_assert_eq!(map.from_wire(&wire), name);
            }
        }
    }
}
