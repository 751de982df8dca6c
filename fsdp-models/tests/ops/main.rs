//! Each fused op against the same mathematics composed of plain candle operations in f64, forward and
//! backward.

mod attention;
mod cross_entropy;
mod elementwise;
mod harness;
mod weights;
