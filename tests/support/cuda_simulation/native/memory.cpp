// Memory of the device and pinned memory of the host, and who may use which when.
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "memory.hpp"

namespace simulation {

Usage& usage() {
  static auto* held = new Usage();
  return *held;
}

struct Access {
  const char* begin;
  const char* end;
  Moment moment;
  bool writes;
  std::string name;
};

// One allocation on the device.
struct Block {
  void* memory;
  size_t size;
  StreamKey owner;  // whose later work may get the memory once it is freed
  std::set<StreamKey> recorded;
  std::vector<Access> accesses;
};

// Found where nothing can be raised, such as while memory is freed; raised by the next work.
static std::string& fault() {
  static auto* text = new std::string();
  return *text;
}

static void raise_fault() {
  if (fault().empty()) return;
  const auto text = std::exchange(fault(), "");
  TORCH_CHECK(false, "simulated CUDA: ", text);
}

static std::string name_of(StreamKey stream) {
  const auto id = stream & ((static_cast<StreamKey>(1) << 48) - 1);
  return id == 0 ? "the default stream" : "stream " + std::to_string(id);
}

// What may still use memory that was freed: whatever its owner allocates next may lie there.
static std::vector<Access>& uses_of_freed(StreamKey owner) {
  static auto* held = new std::map<StreamKey, std::vector<Access>>();
  return (*held)[owner];
}

static void free_block(void* context) {
  std::lock_guard guard(state_lock());
  auto* block = static_cast<Block*>(context);
  Clock known = clock_of(block->owner);
  known.join(host_clock());
  // The allocator waits for what these streams have been given, and wait for, by now.
  for (const auto stream : block->recorded) known.join(clock_of(stream));
  for (auto& access : block->accesses) {
    if (known.covers(access.moment)) continue;
    access.name += " (of memory freed without record_stream)";
    uses_of_freed(block->owner).push_back(access);
  }
  usage().allocated -= block->size;
  std::free(block->memory);
  delete block;
}

static Block* make_block(void* memory, size_t size) {
  auto* block = new Block{memory, size, current_stream(-1), {}, {}};
  auto& freed = uses_of_freed(block->owner);
  Clock known = clock_of(block->owner);
  known.join(host_clock());
  std::erase_if(freed, [&](const Access& access) { return known.covers(access.moment); });
  const auto* begin = static_cast<const char*>(memory);
  for (auto access : freed) {
    access.begin = begin;
    access.end = begin + size;
    block->accesses.push_back(access);
  }
  return block;
}

struct DeviceAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard guard(state_lock());
    void* memory = nullptr;
    if (size) {
      TORCH_CHECK(posix_memalign(&memory, 512, size) == 0, "CUDA out of memory");
      std::memset(memory, 0xFF, size);  // NaN: what nobody wrote is seen
    }
    usage().allocated += size;
    usage().peak = std::max(usage().peak, usage().allocated);
    return {memory, make_block(memory, size), &free_block, Device(DeviceType::CUDA, current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};
static DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_allocator);
c10::Allocator* get_device_allocator() { return &device_allocator; }

static Block* block_of(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().cast_context<Block>(&free_block);
}

static std::pair<const char*, const char*> extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

void use(const at::Tensor& tensor, bool writes, const Moment& moment, const std::string& name) {
  if (!tensor.defined() || tensor.device().type() != DeviceType::CUDA || tensor.numel() == 0) return;
  std::lock_guard guard(state_lock());
  raise_fault();
  auto* block = block_of(tensor);
  if (block == nullptr) return;
  const auto [begin, end] = extent(tensor);
  const auto& known = clock_of(moment.stream);
  for (const auto& other : block->accesses) {
    const bool meets = other.begin < end && begin < other.end && (writes || other.writes);
    TORCH_CHECK(!meets || known.covers(other.moment), "simulated CUDA: '", name, "' on ",
                name_of(moment.stream), writes ? " writes" : " reads", " memory that '", other.name,
                "' on ", name_of(other.moment.stream), other.writes ? " writes" : " reads",
                ", and no event orders the two");
  }
  std::erase_if(block->accesses, [&](const Access& other) {
    const bool inside = begin <= other.begin && other.end <= end;
    return inside && (writes || (!other.writes && other.moment.stream == moment.stream));
  });
  block->accesses.push_back({begin, end, moment, writes, name});
}

void record_use(const at::Tensor& tensor, const c10::Stream& stream) {
  std::lock_guard guard(state_lock());
  if (auto* block = block_of(tensor)) block->recorded.insert(key_of(stream));
}

void resize_storage(c10::StorageImpl* storage, size_t size) {
  const auto old = current_device();
  set_current_device(storage->device().index());
  auto fresh = device_allocator.allocate(size);
  set_current_device(old);
  if (size && storage->nbytes())
    std::memcpy(fresh.get(), storage->data(), std::min<size_t>(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != DeviceType::CUDA) return tensor;
  auto* keep = new c10::Storage(tensor.storage());
  c10::DataPtr data(keep->mutable_data(), keep,
                    [](void* held) { delete static_cast<c10::Storage*>(held); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), keep->nbytes(), std::move(data), nullptr,
                       false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  out._set_conj(tensor.is_conj());
  out._set_neg(tensor.is_neg());
  return out;
}

at::Tensor make_tensor(c10::IntArrayRef sizes, c10::OptionalIntArrayRef strides,
                       at::ScalarType dtype, DeviceIndex device,
                       std::optional<c10::MemoryFormat> format) {
  const auto old = current_device();
  if (device >= 0) set_current_device(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  at::Tensor out =
      strides ? at::TensorBase(at::detail::empty_strided_generic(sizes, *strides, &device_allocator,
                                                                 keys, dtype))
              : at::TensorBase(
                    at::detail::empty_generic(sizes, &device_allocator, keys, dtype, format));
  set_current_device(old);
  return out;
}

// ---- pinned memory: page-locked by its allocator or by cudaHostRegister

static std::map<const char*, size_t>& pinned() {
  static auto* ranges = new std::map<const char*, size_t>();
  return *ranges;
}

void pin(const void* memory, size_t size) {
  std::lock_guard guard(state_lock());
  pinned()[static_cast<const char*>(memory)] = size;
}

void unpin(const void* memory) {
  std::lock_guard guard(state_lock());
  pinned().erase(static_cast<const char*>(memory));
}

bool is_pinned(const void* memory) {
  std::lock_guard guard(state_lock());
  const auto* at = static_cast<const char*>(memory);
  auto after = pinned().upper_bound(at);
  if (after == pinned().begin()) return false;
  --after;
  return at < after->first + after->second;
}

struct HostAllocator final : public at::HostAllocator {
  static void release(void* memory) {
    unpin(memory);
    std::free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    if (size) {
      TORCH_CHECK(posix_memalign(&memory, 4096, size) == 0, "CUDA error: out of pinned memory");
      pin(memory, size);
    }
    return {memory, memory, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static HostAllocator host_allocator;
static at::HostAllocatorRegistry<DeviceType::CUDA> host_allocator_registry(&host_allocator);

// ---- copies that are under way

struct Copy {
  at::Tensor host;   // the pinned end
  at::Tensor bytes;  // what will be there, or was there when the copy began
  bool to_host;
  Moment moment;
};
static std::vector<Copy>& copies() {
  static auto* held = new std::vector<Copy>();
  return *held;
}

static void deliver(const Copy& copy) {
  if (copy.to_host) {
    copy.host.copy_(copy.bytes);
    return;
  }
  const auto now = copy.host.contiguous();
  const bool same = std::memcmp(now.const_data_ptr(), copy.bytes.const_data_ptr(), now.nbytes()) == 0;
  if (!same)
    fault() = "the host changed pinned memory of shape " + c10::str(copy.host.sizes()) +
              " while its copy to the device was under way";
}

// Takes those copies out that fulfill a condition. They are destroyed where nobody holds the lock:
// the last reference to a tensor of Python needs Python's own lock.
template <class Condition>
static std::vector<Copy> take_copies(Condition is_over) {
  std::vector<Copy> over, rest;
  for (auto& copy : copies()) (is_over(copy) ? over : rest).push_back(std::move(copy));
  copies() = std::move(rest);
  for (const auto& copy : over) deliver(copy);
  return over;
}

void host_waits_for(const Clock& clock) {
  std::vector<Copy> over;
  std::lock_guard guard(state_lock());
  host_clock().join(clock);
  over = take_copies([](const Copy& copy) { return host_clock().covers(copy.moment); });
  raise_fault();
}

// What is under way at the same pinned memory has to be ordered before; then it is over.
static std::vector<Copy> finish_copies_at(const at::Tensor& host, bool writes,
                                          const Moment& moment) {
  const auto [begin, end] = extent(host);
  const auto& known = clock_of(moment.stream);
  return take_copies([&, begin = begin, end = end](const Copy& copy) {
    const auto [other_begin, other_end] = extent(copy.host);
    const bool meets = other_begin < end && begin < other_end;
    if (!meets || (!writes && !copy.to_host)) return false;
    if (!known.covers(copy.moment))
      fault() = std::string("pinned memory is copied ") + (writes ? "from" : "to") +
                " the device on " + name_of(moment.stream) + " while it is copied " +
                (copy.to_host ? "from" : "to") + " the device on " + name_of(copy.moment.stream) +
                ", and no event orders the two";
    return true;
  });
}

void begin_copy_to_host(const at::Tensor& target, const at::Tensor& source, const Moment& moment) {
  std::vector<Copy> over;
  std::lock_guard guard(state_lock());
  over = finish_copies_at(target, true, moment);
  const auto bytes = at::empty_like(target).copy_(on_host(source));
  const bool real = target.is_floating_point() || target.is_complex();
  const auto type = target.scalar_type();
  const int whole = type == at::kBool ? 1 : type == at::kByte ? 255 : -1;
  target.fill_(real ? c10::Scalar(std::nan("")) : c10::Scalar(whole));
  copies().push_back({target, bytes, true, moment});
  raise_fault();
}

void begin_copy_from_host(const at::Tensor& target, const at::Tensor& source, const Moment& moment) {
  std::vector<Copy> over;
  std::lock_guard guard(state_lock());
  over = finish_copies_at(source, false, moment);
  on_host(target).copy_(source);
  copies().push_back({source, source.contiguous().clone(), false, moment});
  raise_fault();
}

// ---- random numbers

struct DeviceGenerator final : public c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DeviceType::CUDA, device),
                      c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "RNG state is wrong size");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

static const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (DeviceIndex i = 0; i < NUM_DEVICES; ++i)
      made->push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator generator_of(DeviceIndex device) { return default_generator(device); }

at::Generator for_kernel(const at::Generator& generator, int64_t draws) {
  auto given = generator;
  const auto offset = given.get_offset();
  given.set_offset(offset + (draws + 3) / 4 * 4);
  std::seed_seq mixed{given.current_seed(), given.current_seed() >> 32, offset, offset >> 32};
  std::vector<uint32_t> seed(2);
  mixed.generate(seed.begin(), seed.end());
  return at::detail::createCPUGenerator((static_cast<uint64_t>(seed[0]) << 32) | seed[1]);
}

// ---- what torch asks of CUDA

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  int getNumGPUs() const override { return NUM_DEVICES; }
  DeviceIndex current_device() const override { return simulation::current_device(); }
  DeviceIndex getCurrentDevice() const override { return simulation::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto old = simulation::current_device();
    if (device >= 0) set_current_device(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? simulation::current_device() : device);
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(DeviceType::CUDA, simulation::current_device());
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

static at::CUDAHooksInterface* make_hooks() {
  static auto* hooks = new Hooks();
  return hooks;
}

}  // namespace simulation

extern "C" void simulation_set_hooks(at::CUDAHooksInterface* (*make)());
static const bool hooks_are_set = (simulation_set_hooks(&simulation::make_hooks), true);
