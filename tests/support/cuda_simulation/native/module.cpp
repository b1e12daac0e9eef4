// What Python sees of the device; `runtime.py` puts most of it under torch's own names.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "device.hpp"
#include "memory.hpp"
#include "nccl.hpp"

namespace py = pybind11;

namespace simulation {

static std::atomic<int64_t> launches{0}, waits{0};
static py::object* listener = nullptr;

void tell(Kind kind, const std::string& cause, const std::string& name, int64_t bytes) {
  if (kind == Kind::launch) ++launches;
  if (kind == Kind::wait) ++waits;
  if (listener == nullptr) return;
  py::gil_scoped_acquire gil;
  if (listener == nullptr) return;
  try {
    constexpr const char* names[] = {"launch", "wait", "copy"};
    (*listener)(names[static_cast<int>(kind)], cause, name, bytes);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the listener of the simulated device");
  }
}

static void set_listener(const py::object& function) {
  auto* old = std::exchange(listener, function.is_none() ? nullptr : new py::object(function));
  delete old;
}


}  // namespace simulation

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulation;
  m.attr("NUM_DEVICES") = static_cast<int>(NUM_DEVICES);
  m.def("get_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int device) { set_current_device(static_cast<DeviceIndex>(device)); });
  m.def("synchronize", [] {
    py::gil_scoped_release no_gil;
    c10::impl::VirtualGuardImpl(DeviceType::CUDA).synchronizeDevice(current_device());
  });
  m.def("listen", &set_listener);
  m.def("launches", [] { return launches.load(); });
  m.def("waits", [] { return waits.load(); });
  m.def("memory", [] {
    std::lock_guard guard(state_lock());
    return std::make_pair(usage().allocated, usage().peak);
  });
  m.def("reset_peak", [] {
    std::lock_guard guard(state_lock());
    usage().peak = usage().allocated;
  });
  m.def("init", [] { at::globalContext().lazyInitDevice(at::kCUDA); });
  m.def("pin", [](int64_t memory, int64_t size) { pin(reinterpret_cast<void*>(memory), size); });
  m.def("unpin", [](int64_t memory) { unpin(reinterpret_cast<void*>(memory)); });
  m.def("generator", [](int device) { return generator_of(static_cast<DeviceIndex>(device)); });
  m.def("resize_storage", [](at::Storage storage, int64_t size) {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  });
  m.def("set_timeout", [](const c10::intrusive_ptr<c10d::Backend>& backend, double seconds) {
    backend->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  });
  m.def("record", &record);
  m.def("recorded", [] {
    using Ticks = std::map<StreamKey, uint64_t>;
    std::vector<std::tuple<std::string, std::string, std::vector<Part>, StreamKey, uint64_t, Ticks,
                           Ticks>> all;
    for (auto& e : recorded())
      all.emplace_back(e.group, e.pair, e.parts, e.stream, e.tick, e.after, e.known);
    return all;
  });
  m.def("note", [](const std::string& group, const std::string& name, int peer) {
    std::lock_guard guard(state_lock());
    add_to_record({group, "", {{name, peer, "", {}}}, -1, 0, {}, {}}, host_clock());
  });
  m.def("make_nccl", &make_nccl, py::arg("gloo"), py::arg("rank"), py::arg("size"));
}
