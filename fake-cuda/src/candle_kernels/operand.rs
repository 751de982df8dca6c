//! Tensors as kernels get them: an address, and a shape with strides that lies on the device.

use std::marker::PhantomData;

use super::element::Element;
use crate::kernel::{Access, Launch};

/// Dims and strides in elements.
#[derive(Clone, Debug)]
pub struct Layout {
    dims: Vec<usize>,
    strides: Vec<usize>,
}

impl Layout {
    /// `len` elements without gaps.
    pub fn contiguous(len: usize) -> Self {
        Layout { dims: vec![len], strides: vec![1] }
    }

    /// The layouts of `N` operands of one shape, from parameter `info`, which points to `rank` dims and `N` times as
    /// many strides; without gaps, `len` elements each, where it is null.
    pub fn of<const N: usize>(launch: &Launch<'_>, len: usize, rank: usize, info: usize) -> [Layout; N] {
        if launch.param::<u64>(info) == 0 {
            return std::array::from_fn(|_| Layout::contiguous(len));
        }
        let values = launch.uploaded::<usize>(info).expect("shape and strides are copied by the host");
        assert!(
            values.len() >= (N + 1) * rank,
            "{} words are not {rank} dims and {N} times strides",
            values.len()
        );
        let dims = &values[..rank];
        let strides = |i: usize| values[(i + 1) * rank..(i + 2) * rank].to_vec();
        std::array::from_fn(|i| Layout { dims: dims.to_vec(), strides: strides(i) })
    }

    /// Elements, those that share a place included.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// The last dim; 1 if there is none.
    pub fn last(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// Elements from the first one to behind the last one in memory.
    pub fn extent(&self) -> usize {
        if self.len() == 0 {
            return 0;
        }
        1 + self.dims.iter().zip(&self.strides).map(|(dim, stride)| (dim - 1) * stride).sum::<usize>()
    }

    /// Where each element is, in the order of the shape.
    pub fn offsets(&self) -> impl Iterator<Item = usize> + '_ {
        let mut at = vec![0; self.dims.len()];
        let mut offset = 0;
        (0..self.len()).map(move |_| {
            let here = offset;
            for (axis, (dim, stride)) in self.dims.iter().zip(&self.strides).enumerate().rev() {
                at[axis] += 1;
                offset += stride;
                if at[axis] < *dim {
                    break;
                }
                at[axis] = 0;
                offset -= dim * stride;
            }
            here
        })
    }
}

/// A tensor that a kernel reads.
pub struct Input<T> {
    address: u64,
    layout: Layout,
    dtype: PhantomData<T>,
}

impl<T: Element> Input<T> {
    pub fn new(launch: &Launch<'_>, param: usize, layout: Layout) -> Self {
        Input { address: launch.param(param), layout, dtype: PhantomData }
    }

    /// `len` elements without gaps.
    pub fn flat(launch: &Launch<'_>, param: usize, len: usize) -> Self {
        Input::new(launch, param, Layout::contiguous(len))
    }

    pub fn access(&self) -> Access {
        Access::read(self.address, self.layout.extent() * size_of::<T>())
    }

    /// The elements in the order of the shape.
    pub fn values(&self, launch: &Launch<'_>) -> Vec<T> {
        let values = launch.read::<T>(self.address, self.layout.extent());
        if self.layout.strides == [1] {
            return values;
        }
        self.layout.offsets().map(|offset| values[offset]).collect()
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// The access of a kernel to the shape and strides of `layouts` operands.
pub fn info_access(launch: &Launch<'_>, info: usize, rank: usize, layouts: usize) -> Option<Access> {
    let address = launch.param::<u64>(info);
    (address != 0).then(|| Access::read(address, (layouts + 1) * rank * size_of::<usize>()))
}

/// The access of a kernel that writes `len` elements without gaps to parameter `param`.
pub fn written<T>(launch: &Launch<'_>, param: usize, len: usize) -> Access {
    Access::write(launch.param(param), len * size_of::<T>())
}
