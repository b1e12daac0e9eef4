// What stands for NCCL: gloo on the memory of the device, in a stream of its own as NCCL's.
#include "nccl.hpp"

#include "device.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <numeric>

namespace simulation {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

static std::atomic<bool> records{false};
static std::mutex record_lock;
static std::vector<Asked> asked;
static std::set<StreamKey> streams_of_nccl;

void record(bool on) {
  std::lock_guard guard(record_lock);
  records = on;
  asked.clear();
}

std::vector<Asked> recorded() {
  std::lock_guard guard(record_lock);
  return asked;
}

// What a clock says of the work of NCCL.
static std::map<StreamKey, uint64_t> of_nccl(const Clock& clock) {
  std::map<StreamKey, uint64_t> out;
  for (const auto& [stream, tick] : clock.seen)
    if (streams_of_nccl.contains(stream)) out[stream] = tick;
  return out;
}

static StreamKey new_stream() {
  std::lock_guard guard(record_lock);
  return *streams_of_nccl.insert(new_stream_key()).first;
}

void add_to_record(Asked&& entry, const Clock& after) {
  if (!records) return;
  std::lock_guard guard(record_lock);
  entry.after = of_nccl(after);
  entry.known = of_nccl(host_clock());
  asked.push_back(std::move(entry));
}

static Tensors all_of(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Those that torch has a name of NCCL for; complex numbers are sent as pairs of real ones.
static bool is_sent(at::ScalarType type) {
  constexpr std::array sent{at::kBool,  at::kByte,     at::kChar,   at::kInt,         at::kLong,
                            at::kHalf,  at::kBFloat16, at::kFloat,  at::kDouble,      at::kFloat8_e5m2,
                            at::kFloat8_e4m3fn,        at::kFloat8_e5m2fnuz,          at::kFloat8_e4m3fnuz};
  return c10::isComplexType(type) || std::ranges::find(sent, type) != sent.end();
}

static Tensors on_host(const Tensors& tensors) {
  Tensors out;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.device().is_cuda(), "No backend type associated with device type cpu (NCCL)");
    TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
    const auto type = tensor.scalar_type();
    TORCH_CHECK_TYPE(is_sent(type), "Input tensor data type is not supported for NCCL process group: ",
                     type);
    out.push_back(simulation::on_host(tensor));
  }
  return out;
}

static std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> out;
  for (const auto& list : lists) out.push_back(on_host(list));
  return out;
}

// As work of NCCL: waiting for it makes the current stream wait, not (beyond gloo) the host.
class DeviceWork final : public Work {
 public:
  DeviceWork(std::vector<WorkPtr> inner, Tensors held, Tensors results, StreamKey stream,
             const Clock& end, std::vector<std::function<void()>> finish)
      : inner_(std::move(inner)), held_(std::move(held)), results_(std::move(results)),
        stream_(stream), end_(end), finish_(std::move(finish)) {}

  ~DeviceWork() override {
    // Nobody waited: as NCCL, keep the memory until the work is over.
    const c10::Stream stream = c10::Stream::unpack3(stream_ & 0xFFFFFFFFFFFF, DeviceIndex(stream_ >> 48),
                                                    DeviceType::CUDA);
    if (!is_waited_for_)
      for (const auto& tensor : held_) record_use(tensor, stream);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool done = true;
    for (const auto& inner : inner_) done = inner->wait(timeout) && done;
    for (const auto& finish : std::exchange(finish_, {}))
      if (finish) finish();
    std::lock_guard guard(state_lock());
    clock_of(current_stream(-1)).join(end_);
    is_waited_for_ = true;
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override {
    return std::ranges::all_of(inner_, [](const auto& inner) { return inner->isCompleted(); });
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  std::vector<WorkPtr> inner_;
  Tensors held_, results_;
  StreamKey stream_;
  Clock end_;
  std::vector<std::function<void()>> finish_;
  bool is_waited_for_ = false;
};

// What a thread does.
class Receive final : public Work {
 public:
  explicit Receive(std::future<void> done) : done_(std::move(done)) {}
  bool wait(std::chrono::milliseconds) override {
    if (done_.valid()) done_.get();
    return true;
  }
  bool isCompleted() override {
    return !done_.valid() || done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  std::future<void> done_;
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)), stream_(new_stream()) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }

  // What is asked for between the two is one piece of work, as between ncclGroupStart and its end.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_.emplace(); }
  WorkPtr endCoalescing() override {
    auto batch = std::move(*batch_);
    batch_.reset();
    return begin(std::move(batch), stream_, "");
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto own = on_host(tensors);
    return run("broadcast", tensors, tensors, [&] { return gloo_->broadcast(own, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto own = on_host(tensors);
    auto [sums, finish] = as_sum(options, own);
    return run("all_reduce", tensors, tensors, [&] { return gloo_->allreduce(own, sums); }, finish);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    auto own = on_host(tensors);
    return run("all_reduce", tensors, tensors,
               [&] { return gloo_->allreduce_coalesced(own, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto own = on_host(tensors);
    return run("reduce", tensors, tensors, [&] { return gloo_->reduce(own, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    auto own = on_host(outputs);
    auto in = on_host(inputs);
    return run("all_gather", inputs, all_of(outputs), [&] { return gloo_->allgather(own, in, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    auto out = on_host(Tensors{output}), in = on_host(Tensors{input});
    return run("all_gather", {input}, {output},
               [&] { return gloo_->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    return run("all_gather", inputs, outputs,
               [&] { return gloo_->allgather_into_tensor_coalesced(out, in, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    auto own = on_host(outputs);
    auto in = on_host(inputs);
    return run("gather", inputs, all_of(outputs), [&] { return gloo_->gather(own, in, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return run("scatter", all_of(inputs), outputs, [&] { return gloo_->scatter(out, in, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    auto [sums, finish] = as_sum(options, out);
    return run("reduce_scatter", all_of(inputs), outputs,
               [&] { return gloo_->reduce_scatter(out, in, sums); }, finish);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(Tensors{output}), in = on_host(Tensors{input});
    auto [sums, finish] = as_sum(options, out);
    return run("reduce_scatter", {input}, {output},
               [&] { return gloo_->_reduce_scatter_base(out[0], in[0], sums); }, finish);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    auto [sums, finish] = as_sum(options, out);
    return run("reduce_scatter", inputs, outputs,
               [&] { return gloo_->reduce_scatter_tensor_coalesced(out, in, sums); }, finish);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto out = on_host(Tensors{output}), in = on_host(Tensors{input});
    return run("all_to_all", {input}, {output},
               [&] { return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options); });
  }
  // Gloo has it for one tensor of all parts only.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> sent, received;
    Tensors out = on_host(outputs), flat;
    for (const auto& tensor : on_host(inputs)) {
      flat.push_back(tensor.flatten());
      sent.push_back(tensor.numel());
    }
    for (const auto& tensor : out) received.push_back(tensor.numel());
    auto in = at::cat(flat);
    auto arrived = in.new_empty(std::accumulate(received.begin(), received.end(), int64_t{0}));
    return run("all_to_all", inputs, outputs,
               [&] { return gloo_->alltoall_base(arrived, in, received, sent, options); },
               [out, arrived, received] {
                 const auto parts = arrived.split_with_sizes(received);
                 for (size_t i = 0; i < out.size(); ++i) out[i].copy_(parts[i].view_as(out[i]));
               });
  }
  // NCCL does not compare what is sent with what is expected: it takes the bytes for what they are
  // not, or hangs. So a header goes ahead of each message.
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    auto own = on_host(tensors);
    Tensors header{describe(own[0])};
    auto headed = gloo_->send(header, target, tag + HEADERS);
    return run("send", tensors, {}, [&] { return gloo_->send(own, target, tag); },
               [headed, header] { headed->wait(); }, target);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return run("recv", {}, tensors, [&] { return begin_receive(on_host(tensors), source, tag); },
               nullptr, source);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    tell(Kind::wait, "barrier", "barrier", 0);
    host_waits_for(known_to(current_stream(-1)));
    return run("barrier", {}, {}, [&] { return gloo_->barrier(options); });
  }

 private:
  // Gloo has no mean.
  template <class Options>
  std::pair<Options, std::function<void()>> as_sum(const Options& options, const Tensors& results) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return {options, nullptr};
    auto sums = options;
    sums.reduceOp = c10d::ReduceOp::SUM;
    return {sums, [results, size = getSize()] {
              for (auto result : results) result.div_(size);
            }};
  }

  static at::Tensor describe(const at::Tensor& tensor) {
    return at::tensor({tensor.numel(), static_cast<int64_t>(tensor.scalar_type())}, at::kLong);
  }

  void check(const at::Tensor& header, const at::Tensor& target, int source) const {
    const auto* sent = header.const_data_ptr<int64_t>();
    const auto kind = static_cast<at::ScalarType>(sent[1]);
    TORCH_CHECK(sent[0] == target.numel() && kind == target.scalar_type(), "simulated NCCL: rank ",
                source, " sends ", sent[0], " x ", kind, ", but rank ", getRank(), " expects ",
                target.numel(), " x ", target.scalar_type());
  }

  // A thread takes the header, and then the message; messages in the order in which they were asked
  // for. The caller goes on, and may send what the other end waits for before it sends this.
  WorkPtr begin_receive(Tensors target, int source, int tag) {
    Tensors header{at::zeros({2}, at::kLong)};
    auto headed = gloo_->recv(header, source, tag + HEADERS);
    auto begun = std::make_shared<std::promise<void>>();
    auto done = std::async(std::launch::async, [=, this, before = last_[{source, tag}]]() mutable {
      if (before.valid()) before.wait();
      WorkPtr data;
      try {
        headed->wait(kNoTimeout);
        check(header[0], target[0], source);
        data = gloo_->recv(target, source, tag);
      } catch (...) {
        begun->set_value();
        throw;
      }
      begun->set_value();
      data->wait(kNoTimeout);
    });
    last_[{source, tag}] = begun->get_future().share();
    return c10::make_intrusive<Receive>(std::move(done));
  }

  // One or more pieces of work that NCCL begins at once.
  struct Batch {
    Tensors reads, writes;
    std::vector<WorkPtr> works;
    std::vector<std::function<void()>> finish;
    std::vector<Part> parts;
  };

  WorkPtr run(const std::string& name, const Tensors& reads, const Tensors& writes,
              const std::function<WorkPtr()>& begin_work, std::function<void()> finish = nullptr,
              int peer = -1) {
    Batch alone;
    auto& batch = batch_ ? *batch_ : alone;
    batch.works.push_back(begin_work());
    batch.reads.insert(batch.reads.end(), reads.begin(), reads.end());
    batch.writes.insert(batch.writes.end(), writes.begin(), writes.end());
    batch.finish.push_back(std::move(finish));
    batch.parts.push_back(part(name, peer, reads, writes));
    if (batch_) return nullptr;
    if (peer < 0) return begin(std::move(alone), stream_, "");
    // Outside of a batch, two ranks have a communicator of their own, with a stream of its own.
    auto [place, is_new] = pairs_.try_emplace(peer);
    if (is_new) place->second = new_stream();
    const auto [low, high] = std::minmax({peer, getRank()});
    return begin(std::move(alone), place->second, std::to_string(low) + "-" + std::to_string(high));
  }

  // What all ranks have to agree on. Shares of a gather and an exchange may differ.
  static Part part(const std::string& name, int peer, const Tensors& reads, const Tensors& writes) {
    std::vector<std::vector<int64_t>> shapes;
    const bool by_result = name == "reduce_scatter" || name == "scatter" || name == "recv";
    const auto& compared = by_result ? writes : reads;
    if (name != "all_to_all")
      for (const auto& tensor : compared) shapes.push_back(tensor.sizes().vec());
    const auto dtype = compared.empty() ? "" : std::string(c10::toString(compared[0].scalar_type()));
    return {name, peer, dtype, shapes};
  }

  WorkPtr begin(Batch&& batch, StreamKey stream, const std::string& pair) {
    std::string name;
    for (const auto& [each, peer, dtype, shapes] : batch.parts) {
      tell(Kind::launch, "", each, 0);
      name = each;
    }
    ++number_;
    Clock end;
    {
      std::lock_guard guard(state_lock());
      clock_of(stream).join(clock_of(current_stream(-1)));
      clock_of(stream).join(host_clock());
      const auto before = clock_of(stream);
      const auto moment = launch(stream);
      add_to_record({getGroupUid(), pair, batch.parts, moment.stream, moment.tick, {}, {}}, before);
      for (const auto& tensor : batch.reads) use(tensor, false, moment, name);
      for (const auto& tensor : batch.writes) use(tensor, true, moment, name);
      end = clock_of(stream);
    }
    Tensors held(batch.reads);
    held.insert(held.end(), batch.writes.begin(), batch.writes.end());
    return c10::make_intrusive<DeviceWork>(std::move(batch.works), held, batch.writes, stream, end,
                                           std::move(batch.finish));
  }

  static constexpr int HEADERS = 1 << 24;

  c10::intrusive_ptr<c10d::Backend> gloo_;
  StreamKey stream_;
  uint64_t number_ = 0;
  std::optional<Batch> batch_;
  std::map<int, StreamKey> pairs_;  // of a peer
  std::map<std::pair<int, int>, std::shared_future<void>> last_;  // receive of a source and tag
};

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank,
                                            int size) {
  return c10::make_intrusive<Nccl>(gloo, rank, size);
}

}  // namespace simulation
