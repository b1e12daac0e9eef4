// Streams, events, and the order that they make between uses of memory.
#include "device.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>

namespace simulation {

static thread_local DeviceIndex this_device = 0;
static std::atomic<DeviceIndex> device_of_process{-1};
static thread_local c10::StreamId this_stream[NUM_DEVICES] = {0};
static std::atomic<c10::StreamId> next_stream{1};

StreamKey key_of(const c10::Stream& stream) {
  return (static_cast<StreamKey>(stream.device_index()) << 48) | stream.id();
}

void Clock::join(const Clock& other) {
  for (const auto& [stream, tick] : other.seen) {
    auto& mine = seen[stream];
    mine = std::max(mine, tick);
  }
}

bool Clock::covers(const Moment& moment) const {
  auto found = seen.find(moment.stream);
  return found != seen.end() && found->second >= moment.tick;
}

std::recursive_mutex& state_lock() {
  static auto* lock = new std::recursive_mutex();
  return *lock;
}

Clock& clock_of(StreamKey stream) {
  static auto* clocks = new std::map<StreamKey, Clock>();
  return (*clocks)[stream];
}

Clock& host_clock() {
  static auto* clock = new Clock();
  return *clock;
}

Clock known_to(StreamKey stream) {
  std::lock_guard guard(state_lock());
  return clock_of(stream);
}

StreamKey new_stream_key() {
  return (static_cast<StreamKey>(current_device()) << 48) | next_stream++;
}

DeviceIndex current_device() { return this_device; }
void set_current_device(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < NUM_DEVICES, "CUDA error: invalid device ordinal");
  this_device = device;
}

StreamKey current_stream(DeviceIndex device) {
  const auto index = device < 0 ? this_device : device;
  return (static_cast<StreamKey>(index) << 48) | this_stream[index];
}

Moment launch(StreamKey stream) {
  std::lock_guard guard(state_lock());
  auto& clock = clock_of(stream);
  clock.join(host_clock());
  return {stream, ++clock.seen[stream]};
}

// What `c10::Event` and `torch.Event` hold.
struct EventState {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static DeviceIndex index(const Device& device) {
    return device.index() < 0 ? this_device : device.index();
  }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, this_device); }
  void setDevice(Device device) const override { set_current_device(index(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { this_device = index(device); }
  Device exchangeDevice(Device device) const override {
    const auto old = getDevice();
    setDevice(device);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Stream stream(const Device& device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index(device)), id);
  }
  c10::Stream getStream(Device device) const override {
    return stream(device, this_stream[index(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(device, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(device, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream given) const override {
    const auto old = getStream(given.device());
    this_stream[given.device_index()] = given.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream given) const override {
    return reinterpret_cast<void*>(key_of(given));
  }
  bool queryStream(const c10::Stream& given) const override {
    host_waits_for(known_to(key_of(given)));
    return true;
  }
  void synchronizeStream(const c10::Stream& given) const override {
    tell(Kind::wait, "stream", "Stream.synchronize", 0);
    queryStream(given);
  }
  void synchronizeDevice(const DeviceIndex) const override;

  void record(void** event, const c10::Stream& given, const DeviceIndex,
              const c10::EventFlag) const override {
    std::lock_guard guard(state_lock());
    if (*event == nullptr) *event = new EventState();
    auto& state = *static_cast<EventState*>(*event);
    state.clock = clock_of(key_of(given));
    state.clock.join(host_clock());
    state.time = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& given) const override {
    std::lock_guard guard(state_lock());
    if (event) clock_of(key_of(given)).join(static_cast<EventState*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Clock known;
    {
      std::lock_guard guard(state_lock());
      known = static_cast<EventState*>(event)->clock;
    }
    host_waits_for(known);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) tell(Kind::wait, "event", "Event.synchronize", 0);
    queryEvent(event);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    const auto span = static_cast<EventState*>(end)->time - static_cast<EventState*>(begin)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// All streams: the host then knows of every piece of work that was begun.
void Guard::synchronizeDevice(const DeviceIndex device) const {
  tell(Kind::wait, "device", "synchronize", 0);
  Clock all;
  const StreamKey base = static_cast<StreamKey>(device < 0 ? this_device : device) << 48;
  for (c10::StreamId id = 0; id < next_stream; ++id) all.join(known_to(base | id));
  host_waits_for(all);
}

}  // namespace simulation
