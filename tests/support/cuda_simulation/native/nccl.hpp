#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulation {

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank,
                                            int size);

}  // namespace simulation
