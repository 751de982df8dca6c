//! Serializes infinities and NaN, which JSON does not have.

use std::fmt;

use serde::ser::{
    Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

/// Whether all numbers of a value are finite. JSON has `null` in place of others, which is none when it is read again.
pub(super) fn is_finite(value: &impl Serialize) -> bool {
    let mut finite = Finite(true);
    // An implementation that fails does so for JSON too.
    let _ = value.serialize(&mut finite);
    finite.0
}

struct Finite(bool);

type Outcome = Result<(), fmt::Error>;

macro_rules! fine {
    ($($method:ident: $type:ty,)*) => {
        $(fn $method(self, _: $type) -> Outcome {
            Ok(())
        })*
    };
}

impl<'a> Serializer for &'a mut Finite {
    type Ok = ();
    type Error = fmt::Error;
    type SerializeSeq = &'a mut Finite;
    type SerializeTuple = &'a mut Finite;
    type SerializeTupleStruct = &'a mut Finite;
    type SerializeTupleVariant = &'a mut Finite;
    type SerializeMap = &'a mut Finite;
    type SerializeStruct = &'a mut Finite;
    type SerializeStructVariant = &'a mut Finite;

    fine! {
        serialize_bool: bool, serialize_char: char, serialize_str: &str, serialize_bytes: &[u8],
        serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64,
        serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64,
        serialize_unit_struct: &'static str,
    }

    fn serialize_f32(self, value: f32) -> Outcome {
        self.serialize_f64(value.into())
    }

    fn serialize_f64(self, value: f64) -> Outcome {
        self.0 &= value.is_finite();
        Ok(())
    }

    fn serialize_none(self) -> Outcome {
        Ok(())
    }

    fn serialize_unit(self) -> Outcome {
        Ok(())
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, _: &'static str) -> Outcome {
        Ok(())
    }

    fn serialize_some<T: ?Sized + Serialize>(self, value: &T) -> Outcome {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: ?Sized + Serialize>(self, _: &'static str, value: &T) -> Outcome {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        value: &T,
    ) -> Outcome {
        value.serialize(self)
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Self, fmt::Error> {
        Ok(self)
    }

    fn serialize_tuple(self, _: usize) -> Result<Self, fmt::Error> {
        Ok(self)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Self, fmt::Error> {
        Ok(self)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, fmt::Error> {
        Ok(self)
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Self, fmt::Error> {
        Ok(self)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self, fmt::Error> {
        Ok(self)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, fmt::Error> {
        Ok(self)
    }
}

macro_rules! elements {
    ($($compound:ident: $method:ident,)*) => {
        $(impl $compound for &mut Finite {
            type Ok = ();
            type Error = fmt::Error;

            fn $method<T: ?Sized + Serialize>(&mut self, value: &T) -> Outcome {
                value.serialize(&mut **self)
            }

            fn end(self) -> Outcome {
                Ok(())
            }
        })*
    };
}

macro_rules! fields {
    ($($compound:ident,)*) => {
        $(impl $compound for &mut Finite {
            type Ok = ();
            type Error = fmt::Error;

            fn serialize_field<T: ?Sized + Serialize>(&mut self, _: &'static str, value: &T) -> Outcome {
                value.serialize(&mut **self)
            }

            fn end(self) -> Outcome {
                Ok(())
            }
        })*
    };
}

elements! {
    SerializeSeq: serialize_element,
    SerializeTuple: serialize_element,
    SerializeTupleStruct: serialize_field,
    SerializeTupleVariant: serialize_field,
}

fields! { SerializeStruct, SerializeStructVariant, }

impl SerializeMap for &mut Finite {
    type Ok = ();
    type Error = fmt::Error;

    fn serialize_key<T: ?Sized + Serialize>(&mut self, _: &T) -> Outcome {
        Ok(())
    }

    fn serialize_value<T: ?Sized + Serialize>(&mut self, value: &T) -> Outcome {
        value.serialize(&mut **self)
    }

    fn end(self) -> Outcome {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(serde::Serialize)]
    enum Schedule {
        Off,
        Constant(f64),
        Cosine { from: f32, to: Option<f32> },
        Pair(u8, f32),
    }

    #[test]
    fn what_is_not_finite_is_found_at_any_depth() {
        assert!(is_finite(&(1u8, -2i64, "text", 'c', true, (), 0.5f32, f64::MIN, [1.0f32, 2.0])));
        assert!(is_finite(&Schedule::Off) && is_finite(&None::<f32>) && is_finite(&Some(1.0f32)));
        assert!(is_finite(&BTreeMap::from([("a", vec![1.0f64])])));
        assert!(is_finite(&Schedule::Pair(1, 2.0)));
        assert!(!is_finite(&f32::NAN) && !is_finite(&f64::INFINITY) && !is_finite(&Some(f32::NEG_INFINITY)));
        assert!(!is_finite(&BTreeMap::from([("a", vec![0.0, f64::NAN])])));
        assert!(!is_finite(&Schedule::Constant(f64::INFINITY)) && !is_finite(&Schedule::Pair(1, f32::NAN)));
        assert!(!is_finite(&vec![Schedule::Cosine { from: 1.0, to: Some(f32::INFINITY) }]));
        assert!(!is_finite(&(1, (2, f32::NAN))));
    }
}
