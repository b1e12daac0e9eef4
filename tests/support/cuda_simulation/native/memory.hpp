// Bytes that are allocated on the device.
#pragma once
#include <c10/core/Allocator.h>

namespace simulation {

struct Usage {
  int64_t allocated = 0;
  int64_t peak = 0;
};
Usage& usage();
c10::Allocator* get_device_allocator();

}  // namespace simulation
