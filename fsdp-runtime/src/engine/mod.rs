//! Modules, units and the training-state machine.

mod module;
mod param;
mod scope;
mod sink;
mod unit;

pub use module::{Attrs, Field, FsdpUnit, Tie, Visitor, Walker};
pub use param::Param;
pub use scope::Scope;
pub use sink::GradSink;
pub use unit::UnitCell;
