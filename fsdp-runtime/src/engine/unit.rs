//! `Unit<T>`: one communication unit, and the autograd boundary around it.

/// The runtime's handle to a [`Unit`], filled in when the model is sharded.
#[derive(Debug, Default)]
pub struct UnitCell(());
