//! JSON objects of which some fields matter, read in one pass and without an allocation of their own.
//!
//! Providers write fields of any type, `null` where nothing belongs, and fields that nobody knows. So an object
//! names its fields by hand (see [`Object`]) in place of a derive, which would refuse a field that comes twice:
//! here the last one counts. A field that may be anything is an `Option<&RawValue>`, `None` when it is `null`.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};

/// An object of a known form.
pub(super) trait Object<'a>: Default {
    /// Reads the value of the field of this name from `map`, whether it matters or not. What is read must be of a type
    /// that takes any value, since one that is refused spoils the whole document.
    fn field<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error>;
}

/// The object that this text is; `None` when it is anything else.
pub(super) fn parse<'a, T: Object<'a>>(text: &'a str) -> Option<T> {
    serde_json::from_str::<Maybe<T>>(text).ok()?.0
}

/// Passes over a field that does not matter.
pub(super) fn skip<'a, A: MapAccess<'a>>(map: &mut A) -> Result<(), A::Error> {
    map.next_value::<IgnoredAny>().map(|_| ())
}

/// An object, or nothing when anything else stands in its place.
#[derive(Debug, Default)]
pub(super) struct Maybe<T>(pub(super) Option<T>);

/// A list of objects, or what stands in its place. What is no object in it is passed over.
#[derive(Debug, Default)]
pub(super) enum List<T> {
    /// Nothing, or `null`.
    #[default]
    Absent,
    /// Its objects. The first stands by itself: most lists have one item, which then needs no allocation.
    Items(Option<T>, Vec<T>),
    /// Anything else, in words.
    Other(String),
}

impl<T> List<T> {
    /// Its objects, in order.
    pub(super) fn into_items(self) -> impl Iterator<Item = T> {
        let (first, rest) = match self {
            Self::Items(first, rest) => (first, rest),
            Self::Absent | Self::Other(_) => (None, Vec::new()),
        };
        first.into_iter().chain(rest)
    }
}

/// What takes any JSON value and keeps those of one form.
trait Lenient<'a>: Sized {
    /// Made of a value of another form.
    fn other(value: Unexpected<'_>) -> Self;

    fn object<A: MapAccess<'a>>(mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self::other(Unexpected::Map))
    }

    fn list<A: SeqAccess<'a>>(mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Self::other(Unexpected::Seq))
    }
}

impl<'a, T: Object<'a>> Lenient<'a> for Maybe<T> {
    fn other(_: Unexpected<'_>) -> Self {
        Self(None)
    }

    fn object<A: MapAccess<'a>>(mut map: A) -> Result<Self, A::Error> {
        let mut object = T::default();
        while let Some(Name(name)) = map.next_key()? {
            object.field(&name, &mut map)?;
        }
        Ok(Self(Some(object)))
    }
}

impl<'a, T: Object<'a>> Lenient<'a> for List<T> {
    fn other(value: Unexpected<'_>) -> Self {
        match value {
            Unexpected::Unit => Self::Absent,
            value => Self::Other(value.to_string()),
        }
    }

    fn list<A: SeqAccess<'a>>(mut list: A) -> Result<Self, A::Error> {
        let (mut first, mut rest) = (None, Vec::new());
        while let Some(Maybe(item)) = list.next_element()? {
            match (&first, item) {
                (_, None) => {}
                (None, item) => first = item,
                (Some(_), Some(item)) => rest.push(item),
            }
        }
        Ok(Self::Items(first, rest))
    }
}

impl<'a, T: Object<'a>> Deserialize<'a> for Maybe<T> {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AnyValue(PhantomData))
    }
}

impl<'a, T: Object<'a>> Deserialize<'a> for List<T> {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AnyValue(PhantomData))
    }
}

/// The name of a field, borrowed when it is written without an escape.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// Refuses nothing.
struct AnyValue<T>(PhantomData<T>);

impl<'a, T: Lenient<'a>> Visitor<'a> for AnyValue<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        Ok(T::other(Unexpected::Unit))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<T, E> {
        Ok(T::other(Unexpected::Bool(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        Ok(T::other(Unexpected::Signed(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        Ok(T::other(Unexpected::Unsigned(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
        Ok(T::other(Unexpected::Float(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<T, E> {
        Ok(T::other(Unexpected::Str(value)))
    }

    fn visit_map<A: MapAccess<'a>>(self, map: A) -> Result<T, A::Error> {
        T::object(map)
    }

    fn visit_seq<A: SeqAccess<'a>>(self, list: A) -> Result<T, A::Error> {
        T::list(list)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::provider::json;

    #[derive(Default)]
    struct Leaf<'a>(Option<&'a RawValue>);

    impl<'a> Object<'a> for Leaf<'a> {
        fn field<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
            match name {
                "name" => self.0 = map.next_value()?,
                _ => skip(map)?,
            }
            Ok(())
        }
    }

    #[derive(Default)]
    struct Tree<'a> {
        name: Option<&'a RawValue>,
        child: Maybe<Leaf<'a>>,
        items: List<Leaf<'a>>,
    }

    impl<'a> Object<'a> for Tree<'a> {
        fn field<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
            match name {
                "name" => self.name = map.next_value()?,
                "child" => self.child = map.next_value()?,
                "items" => self.items = map.next_value()?,
                _ => skip(map)?,
            }
            Ok(())
        }
    }

    /// Its name, its child and its items, as it was understood.
    fn shown(tree: Tree<'_>) -> String {
        let text = |raw: Option<_>| raw.and_then(json::text).unwrap_or_default().into_owned();
        let child = tree.child.0.map(|Leaf(name)| format!("({})", text(name))).unwrap_or_default();
        let items = match tree.items {
            List::Absent => String::new(),
            List::Other(what) => format!(" not a list: {what}"),
            items @ List::Items(..) => {
                format!("{:?}", items.into_items().map(|Leaf(name)| text(name)).collect::<Vec<_>>())
            }
        };
        format!("{}{child}{items}", text(tree.name))
    }

    #[test]
    fn an_object_is_read_whatever_stands_in_its_fields() {
        let deep = format!(r#"{{"name":"a","x":{}{}}}"#, "[".repeat(1_000), "]".repeat(1_000));
        for (text, expected) in [
            (r#"{}"#, Some("")),
            (
                r#" {"name":"a","child":{"name":"b"},"items":[{"name":"c"},{"name":"d"},{}]} "#,
                Some(r#"a(b)["c", "d", ""]"#),
            ),
            (r#"{"\u006eame":"a","x":{"name":"b"},"y":"\ud83d"}"#, Some("a")),
            (r#"{"name":"a","name":"b","child":{"name":"c"},"child":null,"items":[{}],"items":[]}"#, Some("b[]")),
            (r#"{"name":7,"child":[{}],"items":[1,"x",null,[{}],{"name":"c"}]}"#, Some(r#"["c"]"#)),
            (r#"{"name":null,"child":"x","items":null}"#, Some("")),
            (r#"{"items":{"a":{}}}"#, Some(" not a list: map")),
            (r#"{"child":-1.5,"items":7}"#, Some(" not a list: integer `7`")),
            (r#"{"child":true,"items":"x"}"#, Some(r#" not a list: string "x""#)),
            (&deep, Some("a")),
            ("[]", None),
            ("null", None),
            ("7", None),
            (r#""x""#, None),
            ("{} {}", None),
            (r#"{"name":"a""#, None),
            (r#"{"child":{"name":}}"#, None),
        ] {
            assert_eq!(parse::<Tree<'_>>(text).map(shown).as_deref(), expected, "{text}");
        }
    }
}
