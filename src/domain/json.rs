//! JSON as text: checking a document, squeezing it and reading one level of it, without ever rewriting what it says.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Deepest nesting of arrays and objects in a request body.
pub const DEPTH_MAX: usize = 128;

/// Largest integer that every JSON reader holds exactly, 2^53 - 1.
pub const SAFE_INTEGER_MAX: i64 = 9_007_199_254_740_991;

/// Why a body is not a JSON document this service reads; each is a 400 `events.bad_json`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonFault {
    /// The bytes are not UTF-8.
    #[error("the body is not valid UTF-8 (byte {0} is the first wrong one)")]
    NotUtf8(usize),
    /// The text breaks the JSON grammar.
    #[error("the body is not valid JSON: {0}")]
    Syntax(String),
    /// Arrays and objects are nested more than [`DEPTH_MAX`] deep.
    #[error("the body is nested more than {DEPTH_MAX} levels deep")]
    TooDeep,
    /// The top level is a string, a number, a boolean or null.
    #[error("the body must be a JSON object or array")]
    NotAContainer,
}

/// Checks that the bytes are one JSON document: UTF-8, well formed, an object or array, at most [`DEPTH_MAX`] deep.
/// Numbers of any size, repeated members and escapes of any kind are well formed. Uses no stack per level.
pub fn check_document(bytes: &[u8]) -> Result<&str, JsonFault> {
    let text = std::str::from_utf8(bytes).map_err(|error| JsonFault::NotUtf8(error.valid_up_to()))?;
    // A raw value is skipped over with a heap-allocated stack, so depth cannot exhaust the thread's own.
    let document: &RawValue = serde_json::from_str(text).map_err(|error| JsonFault::Syntax(error.to_string()))?;
    if !document.get().starts_with(['{', '[']) {
        return Err(JsonFault::NotAContainer);
    }
    if depth(document.get()) > DEPTH_MAX {
        return Err(JsonFault::TooDeep);
    }
    Ok(text)
}

/// The deepest nesting of a well-formed document; 1 for `{}`.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    outside_strings(json, |byte| match byte {
        b'{' | b'[' => {
            depth += 1;
            deepest = deepest.max(depth);
        }
        b'}' | b']' => depth = depth.saturating_sub(1),
        _ => {}
    });
    deepest
}

fn outside_strings(json: &str, mut see: impl FnMut(u8)) {
    let (mut in_string, mut escaped) = (false, false);
    for byte in json.bytes() {
        if !in_string {
            in_string = byte == b'"';
            see(byte);
        } else if escaped {
            escaped = false;
        } else {
            escaped = byte == b'\\';
            in_string = byte != b'"';
        }
    }
}

/// Removes the insignificant white space of a well-formed document and changes nothing else: the spelling of numbers,
/// the order of members, repeated members and escapes stay byte for byte.
pub fn compact(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut in_string, mut escaped, mut kept_from) = (false, false, 0);
    for (index, byte) in json.bytes().enumerate() {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
        } else if byte == b'"' {
            in_string = true;
        } else if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
            out.push_str(&json[kept_from..index]);
            kept_from = index + 1;
        }
    }
    out.push_str(&json[kept_from..]);
    out
}

/// The members of one object in the order they were written, repeats included. A lone surrogate in a name is shown as
/// U+FFFD; values stay as they were written.
#[derive(Debug)]
pub struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Members<'a> {
    /// Reads the members of a well-formed object; `None` when the value is no object.
    pub fn parse(json: &'a str) -> Option<Self> {
        serde_json::from_str(json).ok()
    }

    /// The members in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), *value))
    }

    /// The value of the first member of that name.
    pub fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((Name(name), value)) = map.next_entry()? {
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

/// A member name. Read as bytes, because a name with a lone surrogate is no Rust string and still is no fault.
struct Name<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Lossy;

        impl<'de> Visitor<'de> for Lossy {
            type Value = Name<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a member name")
            }

            fn visit_borrowed_bytes<E>(self, bytes: &'de [u8]) -> Result<Name<'de>, E> {
                Ok(Name(String::from_utf8_lossy(bytes)))
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Owned(String::from_utf8_lossy(bytes).into_owned())))
            }
        }

        deserializer.deserialize_bytes(Lossy)
    }
}

/// Why a JSON value cannot be taken as a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StringFault {
    /// It is another kind of value.
    NotAString,
    /// It holds half of a surrogate pair, which no UTF-8 text can carry.
    LoneSurrogate,
    /// It holds U+0000, which a text column cannot keep.
    Nul,
}

/// The string a well-formed JSON value spells.
pub(crate) fn string(value: &RawValue) -> Result<String, StringFault> {
    if !value.get().starts_with('"') {
        return Err(StringFault::NotAString);
    }
    let text: String = serde_json::from_str(value.get()).map_err(|_| StringFault::LoneSurrogate)?;
    if text.contains('\0') {
        Err(StringFault::Nul)
    } else {
        Ok(text)
    }
}

/// The integer a well-formed JSON value spells, in whatever form (`3`, `3.0`, `30e-1`); `None` for another kind of value,
/// for a fraction, and for more than 2^53 - 1 either way. Exact: no floating point is involved.
pub(crate) fn integer(value: &RawValue) -> Option<i64> {
    let text = value.get();
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [whole, fraction].concat();
    let significant = digits.trim_end_matches('0');
    let dropped = digits.len() - significant.len();
    let significant = significant.trim_start_matches('0');
    if significant.is_empty() {
        return Some(0);
    }
    // An exponent too long for 64 bits cannot be balanced by the digits of any body that fits in memory.
    let exponent: i64 = exponent.parse().ok()?;
    let shift = exponent
        .checked_add(i64::try_from(dropped).ok()?)?
        .checked_sub(i64::try_from(fraction.len()).ok()?)?;
    let shift = u32::try_from(shift).ok()?;
    let magnitude = significant
        .parse::<i64>()
        .ok()?
        .checked_mul(10_i64.checked_pow(shift)?)?;
    (magnitude <= SAFE_INTEGER_MAX).then_some(if negative { -magnitude } else { magnitude })
}

/// Appends the text as a JSON string, escaping only what must be.
pub(crate) fn write_string(out: &mut String, text: &str) {
    use fmt::Write;

    out.push('"');
    let mut kept_from = 0;
    for (index, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[kept_from..index]);
        kept_from = index + 1;
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            other => write!(out, "\\u{other:04x}").expect("writing to a String cannot fail"),
        }
    }
    out.push_str(&text[kept_from..]);
    out.push('"');
}
