// What the parts of the simulated device share: streams and what they know of each other, memory
// and who used it, copies that are under way, random numbers, and what is told to Python.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulation {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceIndex NUM_DEVICES = 64;

// Device and id of a stream in one number.
using StreamKey = int64_t;
StreamKey key_of(const c10::Stream& stream);

// One piece of work: its stream, and its number there.
struct Moment {
  StreamKey stream;
  uint64_t tick;
};

// For each stream, the last piece of its work that is known to be over.
struct Clock {
  std::map<StreamKey, uint64_t> seen;
  void join(const Clock& other);
  bool covers(const Moment& moment) const;
};

// Every function below takes this lock by itself.
std::recursive_mutex& state_lock();
Clock& clock_of(StreamKey stream);
Clock& host_clock();
// What a stream knows now.
Clock known_to(StreamKey stream);
StreamKey current_stream(DeviceIndex device);
StreamKey new_stream_key();
DeviceIndex current_device();
void set_current_device(DeviceIndex device);

// Begins work on a stream: it knows what the host has waited for.
Moment launch(StreamKey stream);

// Checks a use of memory against all earlier ones, and remembers it. Two uses, one of which writes,
// need an event (or a wait) between their streams.
void use(const at::Tensor& tensor, bool writes, const Moment& moment, const std::string& name);
// The allocator may hand the memory out again when this stream has done what it does now.
void record_use(const at::Tensor& tensor, const c10::Stream& stream);
// Gives a storage other memory of its own; what fits is kept.
void resize_storage(c10::StorageImpl* storage, size_t size);

// The host waits: until what a clock knows is over, hence copies up to there are. Nobody may hold
// the lock.
void host_waits_for(const Clock& clock);

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor);
at::Tensor make_tensor(c10::IntArrayRef sizes, c10::OptionalIntArrayRef strides,
                       at::ScalarType dtype, DeviceIndex device,
                       std::optional<c10::MemoryFormat> format = std::nullopt);

void pin(const void* memory, size_t size);
void unpin(const void* memory);
bool is_pinned(const void* memory);

// Copies between pinned memory and the device are over only when somebody has waited for them:
// what goes to the host is not there before, what comes from it must not change before.
void begin_copy_to_host(const at::Tensor& target, const at::Tensor& source, const Moment& moment);
void begin_copy_from_host(const at::Tensor& target, const at::Tensor& source, const Moment& moment);

// As CUDA's, its state is a seed and the number of draws; each kernel draws from a stream of
// numbers that both determine.
at::Generator generator_of(DeviceIndex device);
at::Generator for_kernel(const at::Generator& generator, int64_t draws);

// Tells the listener in Python, and counts.
enum class Kind { launch, wait, copy };
void tell(Kind kind, const std::string& cause, const std::string& name, int64_t bytes);

}  // namespace simulation
