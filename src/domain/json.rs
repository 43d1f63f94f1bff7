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

    /// A name that is given more than once.
    pub fn repeated(&self) -> Option<&str> {
        let mut names: Vec<&str> = self.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
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

/// A number without loss: its digits, the first and the last of them not 0, times ten to the `exponent`. Equal numbers
/// are equal here however they were spelled; zero has no digits.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Decimal {
    /// Below zero.
    pub(crate) negative: bool,
    /// The digits that count.
    pub(crate) digits: String,
    /// How many zeros follow the digits; below 0, how many of them stand behind the point.
    pub(crate) exponent: i64,
}

impl Decimal {
    /// The number a well-formed JSON value spells, in whatever form (`3`, `3.0`, `30e-1`); `None` for another kind of
    /// value, and for an exponent too long for 64 bits, which the digits of no body that fits in memory could balance.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if !text.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = [whole, fraction].concat();
        let significant = all.trim_end_matches('0');
        let dropped = all.len() - significant.len();
        let digits = significant.trim_start_matches('0');
        if digits.is_empty() {
            return Some(Self::default());
        }
        let exponent: i64 = exponent.parse().ok()?;
        let exponent = exponent
            .checked_add(i64::try_from(dropped).ok()?)?
            .checked_sub(i64::try_from(fraction.len()).ok()?)?;
        Some(Self {
            negative,
            digits: digits.to_owned(),
            exponent,
        })
    }
}

/// The integer a well-formed JSON value spells, in whatever form (`3`, `3.0`, `30e-1`); `None` for another kind of value,
/// for a fraction, and for more than 2^53 - 1 either way. Exact: no floating point is involved.
pub(crate) fn integer(value: &RawValue) -> Option<i64> {
    let number = Decimal::parse(value.get())?;
    if number.digits.is_empty() {
        return Some(0);
    }
    let zeros = u32::try_from(number.exponent).ok()?;
    let magnitude = number
        .digits
        .parse::<i64>()
        .ok()?
        .checked_mul(10_i64.checked_pow(zeros)?)?;
    (magnitude <= SAFE_INTEGER_MAX).then_some(if number.negative { -magnitude } else { magnitude })
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn well_formed_documents_pass_whatever_they_hold() {
        for good in [
            "{}",
            "[]",
            " \n{\"a\" : 1} \t",
            r#"{"a":1,"a":2}"#,
            r#"{"big":1e999999,"small":-0.00e-99,"long":123456789012345678901234567890}"#,
            r#"["\u0000","\ud800","\udc00\ud800x","\ud83d\ude00","\/"]"#,
            r#"{"\ud800":1}"#,
        ] {
            assert_eq!(check_document(good.as_bytes()), Ok(good));
        }
    }

    #[test]
    fn malformed_bodies_are_told_apart() {
        for bad in [
            "",
            "{not json",
            "{",
            r#"{"event_id": }"#,
            r#"{"a":1}}"#,
            "[1,2",
            "[1,]",
            "[01]",
            "[1.]",
            "['a']",
            "[\"\t\"]",
            "[\"\\x\"]",
            "[NaN]",
            "\u{feff}{}",
            "{}{}",
        ] {
            assert!(
                matches!(check_document(bad.as_bytes()), Err(JsonFault::Syntax(_))),
                "{bad:?}"
            );
        }
        for scalar in ["null", "\"x\"", "5", "true"] {
            assert_eq!(
                check_document(scalar.as_bytes()),
                Err(JsonFault::NotAContainer),
                "{scalar}"
            );
        }
        assert_eq!(check_document(b"{\"a\":\"\xff\"}"), Err(JsonFault::NotUtf8(6)));
        assert!(
            matches!(check_document(b"\xed\xa0\x80"), Err(JsonFault::NotUtf8(0))),
            "a surrogate in UTF-8"
        );
    }

    #[test]
    fn depth_is_counted_over_the_whole_body_without_using_the_stack() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(check_document(nested(DEPTH_MAX).as_bytes()).is_ok());
        assert_eq!(
            check_document(nested(DEPTH_MAX + 1).as_bytes()),
            Err(JsonFault::TooDeep)
        );
        assert_eq!(check_document(nested(1_000_000).as_bytes()), Err(JsonFault::TooDeep));
        let objects = "{\"a\":".repeat(200_000) + "1" + &"}".repeat(200_000);
        assert_eq!(check_document(objects.as_bytes()), Err(JsonFault::TooDeep));
        assert!(check_document("[".repeat(1_000_000).as_bytes()).is_err());
        assert!(check_document(br#"{"a":"[[[[\"[[[\\","b":["]"]}"#).is_ok());
        let quoted = format!("[\"{}\"]", "[".repeat(1000));
        assert!(
            check_document(quoted.as_bytes()).is_ok(),
            "brackets in strings do not nest"
        );
        let wide = format!("[{}[]]", "[[]],".repeat(1000));
        assert!(check_document(wide.as_bytes()).is_ok(), "closed brackets do not count");
    }

    #[test]
    fn compact_touches_white_space_between_tokens_only() {
        for (given, wanted) in [
            ("{ }", "{}"),
            ("\r\n{\t\"a b\" : [ 1.0 , 1E+2 ,\n-0 ] }", r#"{"a b":[1.0,1E+2,-0]}"#),
            (r#"{ "b": 1, "a": 2, "b": 3 }"#, r#"{"b":1,"a":2,"b":3}"#),
            (
                r#"{ "q": "x \" y \\" , "z": "\\\" }" }"#,
                r#"{"q":"x \" y \\","z":"\\\" }"}"#,
            ),
            (r#"{ "u": "\u0000 \ud800 é 漢" }"#, r#"{"u":"\u0000 \ud800 é 漢"}"#),
            (
                r#"{"n": 10000000000000000000000000000001}"#,
                r#"{"n":10000000000000000000000000000001}"#,
            ),
        ] {
            assert_eq!(compact(given), wanted);
            assert_eq!(compact(wanted), wanted);
        }
    }

    #[test]
    fn members_keep_order_and_repeats() {
        let text = r#" {"b": 1.0, "\u0061": [1, 2], "b": {"x" : 1}, "\ud800": null, "__proto__": 2} "#;
        let members = Members::parse(text).expect("an object");
        let seen: Vec<(&str, &str)> = members.iter().map(|(name, value)| (name, value.get())).collect();
        assert_eq!(seen[..3], [("b", "1.0"), ("a", "[1, 2]"), ("b", r#"{"x" : 1}"#)]);
        assert!(seen[3].0.starts_with('\u{fffd}'));
        assert_eq!(seen[4], ("__proto__", "2"));
        assert_eq!(members.get("b").map(RawValue::get), Some("1.0"));
        assert!(members.get("c").is_none());
        for other in ["[]", "1", "null", "\"x\""] {
            assert!(Members::parse(other).is_none(), "{other}");
        }
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(300_000), "]".repeat(300_000));
        assert_eq!(Members::parse(&deep).expect("an object").iter().count(), 1);
    }

    #[test]
    fn integers_in_every_spelling() {
        for (text, number) in [
            ("0", 0),
            ("-0", 0),
            ("-0.0e5", 0),
            ("0e99999999999999999999999", 0),
            ("1.0", 1),
            ("1e3", 1000),
            ("1E+3", 1000),
            ("1.5e1", 15),
            ("30e-1", 3),
            ("100000000000000000000000e-20", 1000),
            ("0.0000001e7", 1),
            ("-12", -12),
            ("9007199254740991", SAFE_INTEGER_MAX),
            ("-9007199254740991", -SAFE_INTEGER_MAX),
            ("9007199254740991.000", SAFE_INTEGER_MAX),
        ] {
            assert_eq!(integer(raw(text)), Some(number), "{text}");
        }
        for text in [
            "1.5",
            "1e-1",
            "0.1",
            "9007199254740992",
            "1e16",
            "1e999999999999999999999",
            "1e-999999999999999999999",
            "99999999999999999999",
            "1e400",
            "\"1\"",
            "null",
            "true",
            "[]",
            "{}",
        ] {
            assert_eq!(integer(raw(text)), None, "{text}");
        }
        let long = format!("1{}e-{}", "0".repeat(100_000), 100_000);
        assert_eq!(integer(raw(&long)), Some(1));
    }

    #[test]
    fn strings_that_can_be_stored() {
        assert_eq!(string(raw(r#""a\u00e9\ud83d\ude00""#)), Ok("aé😀".to_owned()));
        assert_eq!(string(raw(r#""a\u0000b""#)), Err(StringFault::Nul));
        assert_eq!(string(raw(r#""\ud800""#)), Err(StringFault::LoneSurrogate));
        assert_eq!(string(raw(r#""\udc00x""#)), Err(StringFault::LoneSurrogate));
        assert_eq!(string(raw("5")), Err(StringFault::NotAString));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = check_document(&bytes);
        }

        #[test]
        fn near_json_is_judged_as_serde_judges_it(text in r#"[\[{\]},:"\\ a0-9e.+\n-]{0,24}"#) {
            let container = text.trim_start().starts_with(['{', '[']);
            let expected = serde_json::from_str::<serde_json::Value>(&text).is_ok() && container;
            // A `Value` refuses numbers beyond a double and lone surrogates; the alphabet has no `u`, so only the first counts.
            if !text.contains('e') {
                prop_assert_eq!(check_document(text.as_bytes()).is_ok(), expected, "{}", text);
            }
            if let Ok(text) = check_document(text.as_bytes()) {
                let squeezed = compact(text);
                prop_assert!(check_document(squeezed.as_bytes()).is_ok());
                prop_assert_eq!(compact(&squeezed), squeezed);
            }
        }

        #[test]
        fn written_strings_read_back(text in any::<String>()) {
            let mut out = String::new();
            write_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&out).expect("a JSON string"), text);
            prop_assert!(!out.chars().any(|c| c < ' '), "no control character can reach a line protocol");
        }

        #[test]
        fn compact_keeps_the_value(name in any::<String>(), value in any::<String>(), number in any::<f64>()) {
            let document = serde_json::json!({ name: [value, number] });
            let pretty = serde_json::to_string_pretty(&document).expect("json");
            prop_assert_eq!(compact(&pretty), document.to_string());
        }

        #[test]
        fn integers_agree_with_the_value_they_spell(number in -SAFE_INTEGER_MAX..=SAFE_INTEGER_MAX, zeros in 0..5_usize) {
            let spelt = format!("{number}{}e-{zeros}", "0".repeat(zeros));
            prop_assert_eq!(integer(raw(&spelt)), Some(number));
            let text = format!("{number}.{}", "0".repeat(zeros + 1));
            prop_assert_eq!(integer(raw(&text)), Some(number));
        }
    }
}
