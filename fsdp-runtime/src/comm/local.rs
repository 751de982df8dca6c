//! Ranks are threads of this process.
