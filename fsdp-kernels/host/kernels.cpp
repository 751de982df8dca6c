// The kernels as plain C++, and those with faults.
#include "emulation.h"

namespace emulation {
const Registration* registrations = nullptr;
}

#define FSDP_HOST
#include "../kernels/kernels.cu"

#include "faulty.cuh"
