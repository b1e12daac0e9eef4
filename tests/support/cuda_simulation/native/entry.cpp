// Loaded before torch: makes a CPU-only torch take CUDA for its accelerator, and ask the simulation
// where it would ask the library of CUDA.
#include <c10/core/DeviceType.h>

#include <optional>

namespace at {
struct CUDAHooksInterface;
}

// Of the extension, once it is there.
static at::CUDAHooksInterface* (*make_hooks)() = nullptr;

#define SEEN __attribute__((visibility("default")))

extern "C" SEEN void simulation_set_hooks(at::CUDAHooksInterface* (*make)()) { make_hooks = make; }

namespace at::accelerator {
SEEN std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
SEEN bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }
}  // namespace at::accelerator

namespace at::detail {
SEEN const CUDAHooksInterface& getCUDAHooks() { return *make_hooks(); }
}  // namespace at::detail
