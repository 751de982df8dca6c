use candle_core::Device;

use crate::trainer::TrainError;

pub(in crate::trainer) fn devices() -> crate::Result<usize> {
    Err(TrainError::BuiltWithoutCuda.into())
}

pub(in crate::trainer) fn device(_: usize) -> crate::Result<Device> {
    Err(TrainError::BuiltWithoutCuda.into())
}

#[cfg(test)]
mod tests {
    use crate::trainer::TrainDevice;

    #[test]
    fn a_program_without_cuda_says_how_to_build_it() {
        let message = TrainDevice::Cuda.check().unwrap_err().to_string();
        assert_eq!(message, "this program was built without CUDA: build it with `--features cuda`");
        TrainDevice::Cpu.check().unwrap();
    }
}
