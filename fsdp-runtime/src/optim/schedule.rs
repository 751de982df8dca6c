//! Learning-rate schedules.

use std::f64::consts::PI;

use super::{OptimError, Range};

/// Linear warm-up to a peak, then half a cosine down to a minimum, which stays.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct CosineSchedule {
    /// Steps of warm-up: step `warmup` is the first at the peak. 0 for none.
    pub warmup: u64,
    /// The step at which the minimum is reached.
    pub total: u64,
    /// Highest learning rate.
    pub peak: f64,
    /// Lowest learning rate after the warm-up.
    pub min: f64,
}

impl CosineSchedule {
    /// Learning rate of step `step`, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        if step >= self.total {
            return if step == self.warmup { self.peak } else { self.min };
        }
        let progress = (step - self.warmup) as f64 / (self.total - self.warmup) as f64;
        self.min + (self.peak - self.min) * 0.5 * (1.0 + (PI * progress).cos())
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// If a rate is negative or not finite, or the warm-up is longer than the whole.
    pub fn validate(&self) -> Result<(), OptimError> {
        let range = Range { optimizer: "cosine schedule" };
        range.at_least_zero("peak", self.peak)?;
        range.at_least_zero("min", self.min)?;
        range.check("min", "at most the peak", self.min, self.min <= self.peak)?;
        range.check("warmup", "at most the total", self.warmup as f64, self.warmup <= self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_then_falls_to_the_minimum() {
        let schedule = CosineSchedule { warmup: 4, total: 12, peak: 1.0, min: 0.5 };
        let close = |step, expected: f64| {
            assert!((schedule.lr(step) - expected).abs() < 1e-15, "{step}: {}", schedule.lr(step));
        };
        close(1, 0.25);
        close(3, 0.75);
        close(4, 1.0);
        close(8, 0.75);
        close(12, 0.5);
        close(100, 0.5);
        let falls = (4..12).all(|step| schedule.lr(step) > schedule.lr(step + 1));
        assert!(falls);
    }

    #[test]
    fn without_warm_up_or_fall() {
        let no_warmup = CosineSchedule { warmup: 0, total: 2, peak: 1.0, min: 0.0 };
        assert!((no_warmup.lr(1) - 0.5).abs() < 1e-15);
        let only_warmup = CosineSchedule { warmup: 2, total: 2, peak: 1.0, min: 0.0 };
        assert_eq!([1, 2, 3].map(|step| only_warmup.lr(step)), [0.5, 1.0, 0.0]);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let schedule = CosineSchedule { warmup: 3, total: 2, peak: 1.0, min: 0.0 };
        let error = schedule.validate().unwrap_err().to_string();
        assert_eq!(error, "cosine schedule: warmup must be at most the total, got 3");
        let schedule = CosineSchedule { warmup: 0, total: 2, peak: 1.0, min: 2.0 };
        assert!(schedule.validate().is_err());
    }
}
