//! Each of candle's operations by itself, in all dtypes that it has, on tensors with and without gaps.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::compare::{Values, compare, named, tolerance, values};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
const INTEGERS: [DType; 3] = [DType::U8, DType::U32, DType::I64];

/// The computation's results by name.
fn all(results: Vec<(&str, Result<Tensor>)>) -> Result<Values> {
    results.into_iter().map(|(name, tensor)| named(name, &tensor?)).collect()
}

/// Two tensors of a shape: one as it lies, one that is a part of a larger one, transposed.
fn pair(dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let x = values(&[3, 4, 5], 1, dtype, device)?;
    let y = values(&[5, 7, 3], 2, dtype, device)?.narrow(1, 2, 4)?.transpose(0, 2)?;
    Ok([x, y])
}

/// Small whole numbers from 1 on.
fn whole(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let len = shape.iter().product::<usize>();
    Tensor::from_vec((0..len).map(|i| (i * 5 % 9 + 1) as u32).collect(), shape, device)?.to_dtype(dtype)
}

#[test]
fn functions_of_one_tensor() -> Result<()> {
    for dtype in FLOATS {
        compare(0, tolerance(dtype), |device| {
            let mut results = Vec::new();
            for x in pair(dtype, device)? {
                let positive = (x.abs()? + 0.1)?;
                results.extend(all(vec![
                    ("neg", x.neg()),
                    ("recip", positive.recip()),
                    ("exp", x.exp()),
                    ("log", positive.log()),
                    ("sin", x.sin()),
                    ("cos", x.cos()),
                    ("tanh", x.tanh()),
                    ("erf", x.erf()),
                    ("ceil", x.ceil()),
                    ("floor", x.floor()),
                    ("round", (&x * 10.0)?.round()),
                    ("abs", x.abs()),
                    ("sqr", x.sqr()),
                    ("sqrt", positive.sqrt()),
                    ("gelu", x.gelu()),
                    ("gelu_erf", x.gelu_erf()),
                    ("relu", x.relu()),
                    ("silu", x.silu()),
                    ("sign", x.sign()),
                    ("elu", x.elu(0.5)),
                    ("powf", positive.powf(1.5)),
                    ("affine", x.affine(2.0, -0.5)),
                    ("copy", x.copy()),
                    ("contiguous", x.contiguous()),
                ])?);
            }
            Ok(results)
        })?;
    }
    Ok(())
}

#[test]
fn functions_of_two_tensors() -> Result<()> {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        compare(0, tolerance(dtype), |device| {
            let [x, y] = match INTEGERS.contains(&dtype) {
                true => {
                    [whole(&[3, 4, 5], dtype, device)?, whole(&[5, 4, 3], dtype, device)?.transpose(0, 2)?]
                }
                false => pair(dtype, device)?,
            };
            let larger = x.maximum(&y)?;
            let row = y.narrow(0, 1, 1)?.narrow(1, 2, 1)?;
            all(vec![
                ("add", &x + &y),
                ("sub", larger.sub(&x)),
                ("mul", &x * &y),
                ("div", &x / &y),
                ("maximum", x.maximum(&y)),
                ("minimum", y.minimum(&x)),
                ("broadcast", x.broadcast_add(&row)),
                ("both broadcast", row.broadcast_mul(&x.narrow(2, 3, 1)?)),
                ("eq", x.eq(&y)),
                ("ne", x.ne(&y)),
                ("lt", x.lt(&y)),
                ("le", x.le(&y)),
                ("gt", x.gt(&y)),
                ("ge", x.ge(&y)),
                ("where u8", x.lt(&y)?.where_cond(&x, &y)),
                ("where u32", y.le(&x)?.to_dtype(DType::U32)?.where_cond(&y, &x)),
                ("where i64", y.le(&x)?.to_dtype(DType::I64)?.t()?.where_cond(&y.t()?, &x.t()?)),
            ])
        })?;
    }
    Ok(())
}

#[test]
fn casts() -> Result<()> {
    /// Those that candle has no kernel for.
    fn is_absent(from: DType, to: DType) -> bool {
        let half = |dtype| matches!(dtype, DType::BF16 | DType::F16);
        (half(from) && to == DType::I64) || (from == DType::I64 && half(to))
    }
    for from in FLOATS.into_iter().chain(INTEGERS) {
        for to in FLOATS.into_iter().chain(INTEGERS).filter(|to| !is_absent(from, *to)) {
            compare(0, 0.0, |device| {
                let x = whole(&[4, 6], from, device)?;
                all(vec![("flat", x.to_dtype(to)), ("with gaps", x.narrow(1, 1, 3)?.t()?.to_dtype(to))])
            })?;
        }
    }
    Ok(())
}

#[test]
fn reductions() -> Result<()> {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        compare(0, tolerance(dtype), |device| {
            let mut results = Vec::new();
            let shapes: [&[usize]; 2] = [&[3, 4, 5], &[2, 70, 3]];
            for shape in shapes {
                let x = match INTEGERS.contains(&dtype) {
                    true => {
                        (whole(shape, dtype, device)? / whole(&[1], dtype, device)?.broadcast_as(shape)?)?
                    }
                    // Small, so that sums are.
                    false => (values(shape, 3, dtype, device)? * 0.1)?,
                };
                for axis in 0..3 {
                    results.extend(all(vec![
                        ("sum", x.narrow(1, 0, 3)?.sum(axis)),
                        ("max", x.max(axis)),
                        ("min", x.min_keepdim(axis)),
                        ("argmax", x.narrow(1, 1, 3)?.argmax(axis)),
                        ("argmin", x.argmin(axis)),
                    ])?);
                }
                if dtype != DType::U8 {
                    results.extend(all(vec![("sum of all", x.sum_all()), ("of two", x.sum((0, 2)))])?);
                }
            }
            Ok(results)
        })?;
    }
    Ok(())
}

#[test]
fn products_of_matrices() -> Result<()> {
    for dtype in FLOATS {
        compare(1, tolerance(dtype), |device| {
            let a = values(&[3, 4, 5], 1, dtype, device)?;
            let b = values(&[3, 5, 6], 2, dtype, device)?;
            let (ta, tb) = (values(&[3, 5, 4], 3, dtype, device)?, values(&[3, 6, 5], 4, dtype, device)?);
            let first = |x: &Tensor| x.get(1);
            all(vec![
                ("plain", first(&a)?.matmul(&first(&b)?)),
                ("a transposed", first(&ta)?.t()?.matmul(&first(&b)?)),
                ("b transposed", first(&a)?.matmul(&first(&tb)?.t()?)),
                ("both transposed", first(&ta)?.t()?.matmul(&first(&tb)?.t()?)),
                ("batch", a.matmul(&b)),
                ("batch, both transposed", ta.transpose(1, 2)?.matmul(&tb.transpose(1, 2)?)),
                ("one for the batch", a.broadcast_matmul(&first(&b)?)),
                ("a row", a.get(0)?.narrow(0, 2, 1)?.matmul(&first(&b)?)),
                ("a column", a.get(0)?.matmul(&b.get(2)?.narrow(1, 3, 1)?.contiguous()?)),
            ])
        })?;
    }
    Ok(())
}

#[test]
fn indexing() -> Result<()> {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        for ids in INTEGERS {
            compare(0, tolerance(dtype), |device| {
                let x = whole(&[4, 5, 3], dtype, device)?;
                let ids = |values: &[u32], shape: &[usize]| {
                    Tensor::from_slice(values, shape, device)?.to_dtype(ids)
                };
                let rows = ids(&[3, 0, 3, 1, 2, 2], &[6])?;
                let places = ids(
                    &[0, 4, 1, 2, 2, 3, 4, 4, 0, 1, 3, 2, 0, 0, 1, 2, 3, 4, 4, 4, 1, 0, 2, 3],
                    &[4, 2, 3],
                )?;
                let two = whole(&[4, 2, 3], dtype, device)?;
                let mut results = vec![
                    ("select rows", x.index_select(&rows, 0)),
                    ("select columns", x.index_select(&rows, 1)),
                    ("select last", x.index_select(&ids(&[2, 0, 1, 2], &[4])?, D::Minus1)),
                    ("gather", x.gather(&places, 1)),
                    ("add", x.index_add(&rows.narrow(0, 1, 2)?, &two, 1)),
                ];
                if ids(&[0], &[1])?.dtype() != DType::U8 || dtype.is_float() {
                    results.push(("scatter add", x.scatter_add(&places, &two, 1)));
                    results.push((
                        "scatter",
                        x.scatter(
                            &ids(&[0, 4, 1], &[1, 1, 3])?.broadcast_as((4, 1, 3))?.contiguous()?,
                            &two.narrow(1, 1, 1)?.contiguous()?,
                            1,
                        ),
                    ));
                }
                all(results)
            })?;
        }
    }
    Ok(())
}

#[test]
fn copies_and_fills() -> Result<()> {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        compare(0, tolerance(dtype), |device| {
            let x = whole(&[4, 5, 3], dtype, device)?;
            let target = Tensor::zeros((4, 6, 3), dtype, device)?;
            target.slice_set(&x.narrow(1, 1, 2)?.contiguous()?, 1, 3)?;
            let ones = Tensor::ones((3, 4), dtype, device)?;
            ones.const_set(candle_core::scalar::Scalar::zero(dtype))?;
            all(vec![
                ("cat rows", Tensor::cat(&[&x, &x.narrow(0, 1, 2)?], 0)),
                ("cat columns", Tensor::cat(&[&x, &x.narrow(1, 3, 2)?], 1)),
                ("cat last", Tensor::cat(&[&x.narrow(2, 1, 1)?, &x], 2)),
                ("stack", Tensor::stack(&[&x, &x], 1)),
                ("slice set", Ok(target)),
                ("set", Ok(ones)),
                ("full", Tensor::full(3u8, (2, 3), device)?.to_dtype(dtype)),
                ("ones", Tensor::ones((2, 5), dtype, device)),
                ("pad", x.pad_with_zeros(1, 1, 2)),
                ("permute", x.permute((2, 0, 1))?.contiguous()),
                ("flatten", x.transpose(0, 2)?.flatten_all()),
                ("repeat", x.repeat((1, 2, 1))),
                ("flip", x.flip(&[1])),
                ("sort", x.sort_last_dim(true).map(|(values, _)| values)),
                (
                    "sort down",
                    x.transpose(1, 2)?.contiguous()?.sort_last_dim(false).map(|(values, _)| values),
                ),
            ])
        })?;
    }
    Ok(())
}
