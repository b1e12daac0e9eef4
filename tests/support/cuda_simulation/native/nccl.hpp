#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "device.hpp"

namespace simulation {

// Name, peer (-1: all), dtype and shapes of one operation.
using Part = std::tuple<std::string, int, std::string, std::vector<std::vector<int64_t>>>;

// What was asked of NCCL at one time.
struct Asked {
  std::string group;
  std::string pair;  // the two ranks of the group whose own communicator it is; "": all
  std::vector<Part> parts;
  StreamKey stream;
  uint64_t tick;
  // For each stream of NCCL, what has to be over there: before this begins, and before the host asks.
  std::map<StreamKey, uint64_t> after, known;
};

void record(bool on);
std::vector<Asked> recorded();
// Adds what is asked for after all that a clock knows.
void add_to_record(Asked&& entry, const Clock& after);

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank,
                                            int size);

}  // namespace simulation
