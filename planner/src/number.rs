//! Numbers as placement texts spell them, and the rounding of scores. Services compare both with what another program
//! computed, so the rules are those of ECMAScript: shortest decimal form, and ties of a rounding go up.

/// A number in its default form: `5`, `5.5`, `4e-7`, `1e+21`, `Infinity`.
pub(crate) fn text(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let sign = if value < 0.0 { "-" } else { "" };
    if value.is_infinite() {
        return format!("{sign}Infinity");
    }
    let scientific = format!("{:e}", value.abs());
    let (mantissa, exponent) = scientific.split_once('e').expect("the form has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a whole number");
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let count = i32::try_from(digits.len()).expect("a double has at most 17 digits");
    let point = exponent + 1;
    if point > 21 || point <= -6 {
        let (first, rest) = digits.split_at(1);
        let fraction = if rest.is_empty() {
            String::new()
        } else {
            format!(".{rest}")
        };
        let plus = if exponent < 0 { "" } else { "+" };
        return format!("{sign}{first}{fraction}e{plus}{exponent}");
    }
    let zeros = |count: i32| "0".repeat(usize::try_from(count).unwrap_or_default());
    if point <= 0 {
        return format!("{sign}0.{}{digits}", zeros(-point));
    }
    if count <= point {
        return format!("{sign}{digits}{}", zeros(point - count));
    }
    let (whole, fraction) = digits.split_at(usize::try_from(point).expect("it is positive"));
    format!("{sign}{whole}.{fraction}")
}

/// A number with `decimals` digits behind the point, at most 6; a tie of the exact binary value goes away from zero.
pub(crate) fn fixed(value: f64, decimals: u32) -> String {
    if !value.is_finite() || value.abs() >= 1e21 {
        return text(value);
    }
    let scaled = scaled(value.abs(), decimals);
    let unit = 10_u128.pow(decimals);
    let sign = if value < 0.0 && scaled > 0 { "-" } else { "" };
    if decimals == 0 {
        return format!("{sign}{scaled}");
    }
    let width = usize::try_from(decimals).expect("it is at most 6");
    format!("{sign}{}.{:0width$}", scaled / unit, scaled % unit)
}

/// A number of 0 or more, rounded to 6 decimals as [`fixed`] does.
pub(crate) fn rounded(value: f64) -> f64 {
    /// Below it the scaled number is a whole number that a double holds exactly.
    const EXACT_BELOW: f64 = 9e9;
    if (0.0..EXACT_BELOW).contains(&value) {
        #[expect(clippy::cast_precision_loss, reason = "below 2^53")]
        let scaled = scaled(value, 6) as f64;
        scaled / 1e6
    } else {
        value
    }
}

/// A number of 0 or more, to six significant digits: what a difference of two large sums leaves behind them is noise.
pub(crate) fn significant(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    format!("{value:.5e}").parse().expect("a number that was just written")
}

/// `value` × 10^`decimals` as the nearest whole number, ties up; for values from 0 to 1e21 and at most 6 decimals.
fn scaled(value: f64, decimals: u32) -> u128 {
    const FRACTION_BITS: u32 = 52;
    let bits = value.to_bits();
    let fraction = bits & ((1 << FRACTION_BITS) - 1);
    let exponent = i32::try_from(bits >> FRACTION_BITS & 0x7ff).expect("11 bits");
    let (mantissa, exponent) = if exponent == 0 {
        (fraction, -1074)
    } else {
        (fraction | 1 << FRACTION_BITS, exponent - 1075)
    };
    // 53 bits of the mantissa and 20 of the power: what is shifted out below is all that rounding needs to know.
    let product = u128::from(mantissa) * 10_u128.pow(decimals);
    if exponent >= 0 {
        return product << exponent;
    }
    let shift = exponent.unsigned_abs();
    if shift > 100 {
        return 0;
    }
    let half = 1_u128 << (shift - 1);
    (product + half) >> shift
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_have_their_shortest_form() {
        for (value, expected) in [
            (5.0, "5"),
            (5.5, "5.5"),
            (4e-7, "4e-7"),
            (1.25e-7, "1.25e-7"),
            (1e-6, "0.000001"),
            (0.000_012_3, "0.0000123"),
            (0.1, "0.1"),
            (250.0, "250"),
            (1_000_000_000.0, "1000000000"),
            (1e20, "100000000000000000000"),
            (1e21, "1e+21"),
            (1.5e300, "1.5e+300"),
            (123.456, "123.456"),
            (-2.5, "-2.5"),
            (0.0, "0"),
            (-0.0, "0"),
            (f64::INFINITY, "Infinity"),
        ] {
            assert_eq!(text(value), expected);
        }
    }

    #[test]
    fn a_tie_goes_up_on_the_exact_value() {
        assert_eq!(fixed(0.007_812_5, 6), "0.007813");
        assert!((rounded(0.007_812_5) - 0.007_813).abs() < f64::EPSILON);
        // As a double 1.0000015 is a little less than it reads.
        assert_eq!(fixed(1.000_001_5, 6), "1.000001");
        assert_eq!(
            (fixed(0.5, 0), fixed(1.5, 0), fixed(2.5, 0)),
            ("1".into(), "2".into(), "3".into())
        );
        assert_eq!(fixed(-0.05, 1), "-0.1");
        assert_eq!(fixed(0.25, 1), "0.3");
        assert_eq!(fixed(-0.000_000_1, 6), "0.000000");
        assert_eq!(fixed(f64::INFINITY, 6), "Infinity");
        assert_eq!(fixed(1e21, 6), "1e+21");
        assert_eq!(fixed(1e20, 6), "100000000000000000000.000000");
        assert_eq!(
            (fixed(f64::MIN_POSITIVE, 6), fixed(5e-324, 6)),
            ("0.000000".into(), "0.000000".into())
        );
    }

    #[test]
    fn noise_behind_six_digits_goes_and_nothing_else() {
        for (value, expected) in [
            (1.999_999_943_436_05e-7, 2e-7),
            (2.000_000_165_480_09e-7, 2e-7),
            (4e-7, 4e-7),
            (0.1 + 0.2, 0.3),
            (123_456.78, 123_457.0),
            (0.0, 0.0),
            (f64::INFINITY, f64::INFINITY),
        ] {
            assert_eq!(significant(value).to_bits(), f64::to_bits(expected), "{value}");
        }
    }

    proptest! {
        /// Off the ties, this is the rounding that everybody has; a form reads back as the number.
        #[test]
        fn only_ties_differ_from_the_usual(value in prop_oneof![0.0_f64..2.0, 0.0_f64..1e5, 0.0_f64..1e-4]) {
            prop_assert_eq!(fixed(value, 6), format!("{value:.6}"));
            prop_assert_eq!(text(value).parse::<f64>().ok(), Some(value));
            if value < 9e9 {
                prop_assert_eq!(Some(rounded(value)), format!("{value:.6}").parse().ok());
            }
        }

        #[test]
        fn every_tie_goes_up(whole in 0_u32..1_000_000) {
            // An odd number of 128ths has a 5 as its seventh and last decimal.
            let value = f64::from(whole * 2 + 1) / 128.0;
            let exact = u64::from(whole * 2 + 1) * 78_125;
            prop_assert_eq!(exact % 10, 5);
            let up = exact / 10 + 1;
            prop_assert_eq!(fixed(value, 6), format!("{}.{:06}", up / 1_000_000, up % 1_000_000));
        }
    }
}
