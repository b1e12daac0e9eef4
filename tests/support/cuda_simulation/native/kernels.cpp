// Kernels of the device: those of the CPU, on the same memory, with the rules of CUDA around them.
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

namespace simulation {

using c10::IValue;
using Stack = torch::jit::Stack;

// The host has to know how large their result is, or what is in it.
static const std::set<std::string> reads_on_host = {
    "aten::nonzero",       "aten::masked_select",      "aten::_unique2", "aten::unique_dim",
    "aten::equal",         "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave",
    "aten::is_nonzero",    "aten::_unique"};
// They move indices of the CPU to the device.
static const std::set<std::string> moves_indices = {"aten::index", "aten::index_put_",
                                                    "aten::_index_put_impl_"};
// They take no scalar of the CPU.
static const std::set<std::string> takes_no_scalar = {
    "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_",
    "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_"};

static bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DeviceType::CUDA;
}

static void wait_for_stream(DeviceIndex device, const std::string& cause, const std::string& name,
                            int64_t bytes) {
  tell(Kind::wait, cause, name, bytes);
  host_waits_for(known_to(current_stream(device)));
}

template <class Function>
static void each_tensor(const IValue& value, Function visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toList())
      if (item.isTensor()) visit(item.toTensor());
  }
}

// Gives an operator's arguments to a kernel of the CPU, and its results back to the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack),
        first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    check_devices();
    tell(Kind::launch, "", name_, 0);
    if (waits()) wait_for_stream(device_, "result on the host", name_, 0);
    moment_ = launch(current_stream(device_));
    for (size_t i = 0; i < schema_.arguments().size(); ++i) to_host(i);
    run_kernel();
    for (auto& [tensor, own] : owned_) {
      if (tensor.sizes() != own.sizes()) tensor.resize_(own.sizes());
      if (own.numel()) on_host(tensor).copy_(own);
    }
    const auto count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) to_device(i, stack_->size() - count + i);
  }

 private:
  void check_devices() {
    device_ = current_device();
    bool any = false;
    std::string strangers;
    std::set<DeviceIndex> devices;
    const auto look = [&](const at::Tensor& t) {
      if (on_device(t)) {
        any = true;
        device_ = t.device().index();
        devices.insert(device_);
      } else if (t.defined() && t.device().is_cpu() && (t.dim() || takes_no_scalar.count(name_))) {
        strangers += c10::str(" ", t.scalar_type(), t.sizes());
      }
    };
    for (size_t i = first_; i < stack_->size(); ++i) each_tensor((*stack_)[i], look);
    if (!any) return;
    TORCH_CHECK(devices.size() < 2, "Expected all tensors to be on the same device, but ", name_,
                " got tensors of ", devices.size(), " CUDA devices");
    if (strangers.empty()) return;
    TORCH_CHECK(moves_indices.count(name_), "Expected all tensors to be on the same device, but found"
                " at least two devices, cuda:", int(device_), " and cpu! (", name_, " got from the CPU:",
                strangers, ")");
    wait_for_stream(device_, "indices from the host", name_, 0);
  }

  bool waits() const {
    if (!reads_on_host.count(name_)) return false;
    // Who says how long the result is need not wait.
    const bool is_sized = name_ == "aten::repeat_interleave" && !stack_->back().isNone();
    return !is_sized;
  }

  at::Tensor to_host(const at::Tensor& tensor, bool writes) {
    if (!on_device(tensor)) return tensor;
    for (const auto& [original, alias] : pairs_)
      if (original.is_same(tensor)) return alias;
    use(tensor, writes, moment_, name_);
    // A kernel may make an empty result larger, which memory that it does not own cannot be.
    const bool grows = writes && tensor.numel() == 0;
    auto alias = grows ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : on_host(tensor);
    if (grows) owned_.emplace_back(tensor, alias);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }

  void to_host(size_t place) {
    auto& value = (*stack_)[first_ + place];
    const auto* alias = schema_.arguments()[place].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      value = to_host(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& t : value.toTensorList()) moved.push_back(to_host(t, writes));
      value = moved;
    } else if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> moved;
      for (const IValue& item : value.toList())
        moved.push_back(item.isTensor() ? std::optional(to_host(item.toTensor(), writes)) : std::nullopt);
      value = moved;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) device_ = value.toDevice().index();
      value = Device(at::kCPU);
    } else if (value.isGenerator() && value.toGenerator().defined() &&
               value.toGenerator().device().is_cuda()) {
      generator_ = value.toGenerator();
    }
  }

  void run_kernel() {
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.redispatchBoxed(cpu, stack_);
      return;
    }
    int64_t draws = 0;
    for (const auto& [original, alias] : pairs_) draws = std::max(draws, alias.numel());
    const auto source = generator_.defined() ? generator_ : generator_of(device_);
    const auto drawn = for_kernel(source, std::max<int64_t>(draws, 4));
    bool given = false;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const auto& type = *schema_.arguments()[i].real_type();
      if (type.str().find("Generator") == std::string::npos) continue;
      (*stack_)[first_ + i] = drawn;
      given = true;
    }
    if (given) {
      op_.redispatchBoxed(cpu, stack_);
      return;
    }
    // Such as dropout, which draws from the default generator.
    auto common = at::detail::getDefaultCPUGenerator();
    const auto state = common.get_state();
    common.set_state(drawn.get_state());
    try {
      op_.redispatchBoxed(cpu, stack_);
    } catch (...) {
      common.set_state(state);
      throw;
    }
    common.set_state(state);
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const auto& [original, alias] : pairs_)
      if (alias.is_same(tensor)) return original;
    auto out = make_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device_);
    use(out, true, moment_, name_);
    if (tensor.numel()) on_host(out).copy_(tensor);
    return out;
  }

  void to_device(size_t place, size_t at) {
    const auto* alias = schema_.returns()[place].alias_info();
    const bool is_view = alias != nullptr && !alias->isWrite();
    TORCH_CHECK(!is_view, "simulated CUDA: ", name_, " gives a view; add it to kernels.cpp");
    auto& value = (*stack_)[at];
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& t : value.toTensorList()) moved.push_back(to_device(t));
      value = moved;
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Stack* stack_;
  size_t first_;
  DeviceIndex device_ = 0;
  Moment moment_{};
  at::Generator generator_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // on the device, and the same on the CPU
  std::vector<std::pair<at::Tensor, at::Tensor>> owned_;  // and those whose memory is another
};

static void run_on_host(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// ---- copies

static at::Tensor& copy_between(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_host = on_device(source);
  const at::Tensor& there = to_host ? source : self;
  const at::Tensor& host = to_host ? self : source;
  const auto device = there.device().index();
  const int64_t bytes = self.numel() * static_cast<int64_t>(self.element_size());
  const bool pinned = is_pinned(host.const_data_ptr());
  // A change of dtype runs on the device, through memory that is not pinned.
  const bool plain = self.scalar_type() == source.scalar_type();
  const auto moment = launch(current_stream(device));
  use(there, !to_host, moment, "copy_");
  if (non_blocking && pinned && plain) {
    tell(Kind::copy, to_host ? "to the host" : "from the host", "copy_", bytes);
    if (to_host)
      begin_copy_to_host(self, source, moment);
    else
      begin_copy_from_host(self, source, moment);
    return self;
  }
  const std::string way = to_host ? "copy to the host" : "copy from the host";
  // From memory that can be paged out a copy is staged, to it the host waits for the end.
  wait_for_stream(device, non_blocking ? "unpinned " + way : way, "copy_", bytes);
  on_host(self).copy_(on_host(source));
  return self;
}

static at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  tell(Kind::launch, "", "aten::copy_", 0);
  const at::Tensor from = source.expand(self.sizes());
  if (on_device(self) != on_device(from)) return copy_between(self, from, non_blocking);
  const auto moment = launch(current_stream(self.device().index()));
  use(from, false, moment, "copy_");
  use(self, true, moment, "copy_");
  on_host(self).copy_(on_host(from));
  return self;
}

// One kernel, unless a list has tensors of the host.
static void foreach_copy(at::TensorList self, at::TensorList sources, bool non_blocking) {
  const auto is_here = [](const at::Tensor& tensor) { return on_device(tensor); };
  if (!std::ranges::all_of(self, is_here) || !std::ranges::all_of(sources, is_here)) {
    for (size_t i = 0; i < self.size(); ++i) self[i].copy_(sources[i], non_blocking);
    return;
  }
  tell(Kind::launch, "", "aten::_foreach_copy_", 0);
  const auto moment = launch(current_stream(self[0].device().index()));
  for (size_t i = 0; i < self.size(); ++i) {
    use(sources[i], false, moment, "_foreach_copy_");
    use(self[i], true, moment, "_foreach_copy_");
    on_host(self[i]).copy_(on_host(sources[i]));
  }
}

// CUDA has one kernel for bfloat16; for others torch goes expert by expert, with sizes on the host.
static void grouped_mm(const c10::OperatorHandle& op, Stack* stack) {
  const auto& first = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  if (first.scalar_type() == at::kBFloat16) return run_on_host(op, stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CompositeExplicitAutograd), stack);
}

// CUDA counts whole numbers, too.
static void histc(const c10::OperatorHandle& op, Stack* stack) {
  auto& first = (*stack)[stack->size() - op.schema().arguments().size()];
  const auto dtype = first.toTensor().scalar_type();
  if (!at::isIntegralType(dtype, /*includeBool=*/false)) return run_on_host(op, stack);
  first = first.toTensor().to(at::kDouble);
  run_on_host(op, stack);
  stack->back() = stack->back().toTensor().to(dtype);
}

static at::Scalar read_scalar(const at::Tensor& self) {
  const auto device = self.device().index();
  use(self, false, launch(current_stream(device)), "item");
  wait_for_stream(device, "item", "item", self.element_size());
  return at::_local_scalar_dense(on_host(self));
}

// ---- what changes no memory

static at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  const auto index = device.has_value() ? device->index() : DeviceIndex(-1);
  return make_tensor(size, {}, c10::dtype_or_default(dtype), index, format);
}

static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<Device> device, std::optional<bool>) {
  const auto index = device.has_value() ? device->index() : DeviceIndex(-1);
  return make_tensor(size, stride, c10::dtype_or_default(dtype), index);
}

static at::Tensor& set_place(at::Tensor& self, at::Storage storage, int64_t offset,
                             c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride);
  impl->set_storage_offset(offset);
  return self;
}

static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_place(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_place(self, std::move(storage), 0, {size}, {1});
}

static const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                                std::optional<c10::MemoryFormat>) {
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const auto needed = (self.numel() + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes())
    resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

static void record_stream(at::Tensor& self, c10::Stream stream) { record_use(self, stream); }

// The choice between kernels of CUDA is not simulated: attention is its plain products.
static at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const std::optional<at::Tensor>& mask, double dropout, bool causal,
                            std::optional<double> scale, bool grouped) {
  auto bias = mask;
  if (mask && mask->scalar_type() == at::kBool)  // as torch's own choice does before all kernels
    bias = at::zeros_like(*mask, mask->options().dtype(query.dtype()))
               .masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal,
                                                            std::nullopt, scale, grouped));
}

}  // namespace simulation

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulation::run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", simulation::copy);
  m.impl("_local_scalar_dense", simulation::read_scalar);
  m.impl("empty.memory_format", simulation::empty);
  m.impl("empty_strided", simulation::empty_strided);
  m.impl("set_.source_Storage_storage_offset", simulation::set_place);
  m.impl("set_.source_Tensor", simulation::set_tensor);
  m.impl("set_.source_Storage", simulation::set_storage);
  m.impl("resize_", simulation::resize);
  m.impl("record_stream", simulation::record_stream);
  m.impl("scaled_dot_product_attention", simulation::attention);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_foreach_copy_", simulation::foreach_copy);
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&simulation::grouped_mm>());
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&simulation::histc>());
  // CUDA has kernels for these, where torch's own way for other devices is another: one for each
  // tensor of a list, a result that changes its shape, a choice by what this library lacks.
  static const std::set<std::string> own = {"aten::mse_loss", "aten::smooth_l1_loss", "aten::convolution",
                                            "aten::convolution_backward"};
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if ((own.count(name.name) && name.overload_name.empty()) ||
        (name.name.starts_with("aten::_foreach_") && name.name != "aten::_foreach_copy_"))
      m.impl(c10::toString(name).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&simulation::run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("scaled_dot_product_attention", simulation::attention);
}
