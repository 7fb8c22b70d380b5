// Gloo, with NCCL between GPUs where all have it. The only source that sees c10d.
#define USE_DISTRIBUTED
#define USE_C10D_GLOO
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/collectives.h>
#include <emend/devices/detail/nccl_library.h>
#include <emend/devices/route.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

namespace emend::devices {
namespace {

using detail::nccl_gpu, detail::nccl_plugin, detail::NcclGroup;

using at::Tensor;

/// The first line of an exception's text, without LibTorch's stack.
std::string brief(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

// The same in every process, whatever its standard library.
uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

std::string describe(const Tensor& tensor) {
  std::string text = c10::toString(tensor.scalar_type());
  for (const int64_t n : tensor.sizes()) text += " " + std::to_string(n);
  return text;
}

constexpr std::chrono::seconds kPatience(15);  // then a process that waits says so, once a call

class GlooGroup final : public Collectives {
 public:
  GlooGroup(const ProcessEnvironment& environment, ProcessTimeouts timeouts, Log log)
      : environment_(environment), timeouts_(timeouts), log_(std::move(log)) {
    const auto run = [&] {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(environment.master_port);
      options.isServer = environment.rank == 0 && !environment.agent_store;
      options.numWorkers = static_cast<size_t>(environment.size);
      options.waitWorkers = false;
      options.timeout = timeouts.join;
      auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_address, options);
      auto keys = c10::make_intrusive<c10d::PrefixStore>("emend/" + environment.attempt, store);
      auto group_options = c10d::ProcessGroupGloo::Options::create(timeouts.join);
      group_options->devices.push_back(make_device(environment));
      group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(keys, environment.rank, environment.size, group_options);
      group_->setTimeout(timeouts.call);
    };
    try {
      note("joining the group", timeouts.join);
      run();
      note("");
    } catch (const std::exception& error) {
      throw Error(
          ErrorClass::kDevice,
          {who() + ": joining the group at " + environment.master_address + ":" +
               std::to_string(environment.master_port),
           brief(error), "all " + std::to_string(environment.size) + " processes to appear and the port to be free",
           "see the other processes' messages, or set MASTER_PORT to another port"});
    }
  }

  [[nodiscard]] int rank() const noexcept override { return environment_.rank; }
  [[nodiscard]] int size() const noexcept override { return environment_.size; }

  void all_reduce_sum(Tensor& tensor) override {
    const auto offers = agree("all_reduce_sum of " + describe(tensor), nccl_gpu(tensor, log_));
    const c10::NoGradGuard no_grad;
    auto* gpus = gpus_of(offers, tensor.device());
    const auto dtype = tensor.is_floating_point() ? at::kDouble : at::kLong;
    Tensor sum = (gpus ? tensor.detach() : to_host(tensor.detach(), Purpose::kStatistics)).to(dtype).contiguous();
    if (sum.is_same(tensor) || sum.is_alias_of(tensor)) sum = sum.clone();
    std::vector<Tensor> tensors{sum.view(-1)};
    if (gpus)
      on_gpus("all_reduce_sum", *gpus, [&] { return gpus->all_reduce_sum(sum); });
    else
      guarded("all_reduce_sum", [&] { group_->allreduce(tensors)->wait(); });
    tensor.copy_(route_like(sum, tensor, Purpose::kStatistics, Dtype::kMatch));
  }

  [[nodiscard]] std::vector<std::string> all_gather(std::string_view bytes) override {
    agree("all_gather of bytes");
    return gather_bytes(bytes);
  }

  void barrier() override { agree("barrier"); }

 private:
  static std::shared_ptr<gloo::transport::Device> make_device(const ProcessEnvironment& environment) {
    using Group = c10d::ProcessGroupGloo;
    if (const char* name = std::getenv("GLOO_SOCKET_IFNAME"); name && *name)
      return Group::createDeviceForInterface(name);
    const auto& address = environment.master_address;
    const bool one_machine = environment.local_size == environment.size &&
                             (address.starts_with("127.") || address == "localhost" || address == "::1");
    return one_machine ? Group::createDeviceForHostname("127.0.0.1") : Group::createDefaultDevice();
  }

  [[nodiscard]] std::string who() const {
    return "process " + std::to_string(environment_.rank) + " of " + std::to_string(environment_.size);
  }

  /// What may wait from now on, and for how long; nothing: it has ended.
  void note(const std::string& under_way, std::chrono::milliseconds longest = {}) {
    const std::lock_guard lock(watched_);
    under_way_ = under_way;
    longest_ = longest;
    since_ = std::chrono::steady_clock::now();
  }

  /// Runs a call of the group. After a failure the group is of no more use.
  template <class Call>
  void guarded(const std::string& name, const Call& call) {
    if (broken_) lost(name, "an earlier call failed");
    note(name, timeouts_.call);
    try {
      call();
    } catch (const std::exception& error) {
      note("");
      broken_ = true;
      lost(name, brief(error));
    }
    note("");
  }

  /// A process that is stopped, or slow, looks like a hang to the others: looks every second, and says so once a call.
  void watch(const std::stop_token& done) {
    std::unique_lock lock(watched_);
    std::condition_variable_any ended;
    while (!ended.wait_for(lock, done, std::chrono::seconds(1), [&] { return done.stop_requested(); })) {
      if (under_way_.empty() || std::chrono::steady_clock::now() - since_ < kPatience) continue;
      log_.warning("processes.waiting",
                   who() + ": " + under_way_ + ": no answer from every process for " +
                       std::to_string(kPatience.count()) + " s: is one stopped or slow? " + "This one gives up after " +
                       std::to_string(duration_cast<std::chrono::minutes>(longest_).count()) + " min");
      under_way_.clear();
    }
  }

  [[noreturn]] void lost(const std::string& name, const std::string& reason) const {
    throw Error(ErrorClass::kDevice, {who() + ": " + name, reason, "an answer from every process",
                                      "another process has ended or lost its connection: see its own message"});
  }

  /// Everyone must be about to make the same call; doubles as a barrier. Returns everyone's `offer`.
  std::vector<int64_t> agree(const std::string& call, int64_t offer = 0) {
    const auto hash = static_cast<int64_t>(fnv1a(call));
    const auto all = gather(call, at::tensor({hash, offer}, at::kLong));
    std::vector<int64_t> offers;
    for (int r = 0; r < size(); ++r) {
      const auto* numbers = all[static_cast<size_t>(r)].const_data_ptr<int64_t>();
      if (numbers[0] != hash) {
        broken_ = true;
        refuse({who() + ": " + call, "process " + std::to_string(r) + " makes another call",
                "the same calls with the same shapes in every process", ""});
      }
      offers.push_back(numbers[1]);
    }
    return offers;
  }

  // ---- NCCL: all or none. Every decision is made from what was gathered, so that it is the same everywhere. --------

  /// The communicator of these GPUs, made at the first call; null if a process has none or shares one with another.
  NcclGroup* gpus_of(const std::vector<int64_t>& offers, c10::Device device) {
    if (std::set<int64_t>(offers.begin(), offers.end()).size() != offers.size() || std::ranges::count(offers, 0) > 0)
      return nullptr;
    const auto [at, fresh] = gpus_.try_emplace(offers);
    if (!fresh) return at->second.get();
    const auto& plugin = *nccl_plugin(log_);
    const auto version = std::to_string(plugin.version());
    for (const auto& other : gather_bytes(version))
      if (other != version) {
        log_.debug("nccl", "NCCL " + version + " here, " + other + " in another process: summing through host memory");
        return nullptr;
      }
    std::string id(kNcclIdBytes, '\0');
    if (rank() != 0 || plugin.unique_id(id.data()) != 0) id.clear();
    id = gather_bytes(id)[0];
    at->second = std::make_unique<NcclGroup>(device, plugin);
    auto* gpus = at->second.get();
    on_gpus("joining the GPUs", *gpus, [&] { return id.empty() ? 1 : gpus->join(id, rank(), size()); });
    return gpus;
  }

  /// Starts work on the GPUs and waits until it is done in every process. While it runs, the processes tell each other
  /// how far they are, over Gloo: NCCL alone would wait for a lost one for ever. After a failure anywhere, work that
  /// still runs is given up everywhere, and the group is of no more use.
  void on_gpus(const std::string& name, const NcclGroup& gpus, const std::function<int()>& start) {
    try {
      std::string reason;
      auto mine = start() == 0 ? NcclState::kRunning : NcclState::kFailed;
      if (mine == NcclState::kFailed) reason = gpus.last_error();
      const auto begin = std::chrono::steady_clock::now();
      for (auto pause = std::chrono::microseconds(200);; pause = std::min(2 * pause, kLongestPause)) {
        for (const auto until = std::chrono::steady_clock::now() + pause;
             mine == NcclState::kRunning && std::chrono::steady_clock::now() < until;
             std::this_thread::sleep_for(std::chrono::microseconds(20))) {
          mine = gpus.poll();
          if (mine == NcclState::kFailed) reason = gpus.last_error();
        }
        if (mine == NcclState::kRunning && std::chrono::steady_clock::now() - begin > timeouts_.call) {
          mine = NcclState::kFailed;
          reason = "not done after " + std::to_string(timeouts_.call.count()) + " s";
        }
        if (all_done(name, mine, reason)) return;
      }
    } catch (...) {
      gpus_.clear();
      broken_ = true;
      throw;
    }
  }

  /// Tells the others how far this process is. Throws Error(kDevice) if one of them, or this one, has failed.
  bool all_done(const std::string& name, NcclState mine, const std::string& reason) {
    const auto all = gather(name, at::full({1}, static_cast<int64_t>(mine), at::kLong));
    bool done = true;
    for (int r = 0; r < size(); ++r) {
      const auto state = static_cast<NcclState>(all[static_cast<size_t>(r)].item<int64_t>());
      done = done && state == NcclState::kDone;
      if (state == NcclState::kFailed)
        throw Error(ErrorClass::kDevice,
                    {who() + ": " + name + " over NCCL",
                     reason.empty() ? "process " + std::to_string(r) + " failed: see its own message" : reason,
                     "the GPUs of all processes to reach each other",
                     "set NCCL_DEBUG=INFO to see why, or EMEND_NCCL_PLUGIN=none to go through host memory"});
    }
    return done;
  }

  /// Everyone's tensor, of the same shape everywhere.
  std::vector<Tensor> gather(const std::string& name, const Tensor& mine_in) {
    std::vector<std::vector<Tensor>> all(1);
    for (int r = 0; r < size(); ++r) all[0].push_back(at::empty_like(mine_in));
    std::vector<Tensor> mine{mine_in};
    guarded(name, [&] { group_->allgather(all, mine)->wait(); });
    return all[0];
  }

  /// Sizes first, then data padded to the longest.
  std::vector<std::string> gather_bytes(std::string_view bytes) {
    int64_t longest = 0;
    const auto lengths = gather("all_gather", at::full({1}, std::ssize(bytes), at::kLong));
    for (const auto& length : lengths) longest = std::max(longest, length.item<int64_t>());
    std::vector<std::string> result(static_cast<size_t>(size()));
    if (longest == 0) return result;
    auto padded = at::zeros({longest}, at::kByte);
    if (!bytes.empty()) std::memcpy(padded.data_ptr(), bytes.data(), bytes.size());
    const auto contents = gather("all_gather", padded);
    for (size_t r = 0; r < result.size(); ++r)
      result[r].assign(static_cast<const char*>(contents[r].data_ptr()),
                       static_cast<size_t>(lengths[r].item<int64_t>()));
    return result;
  }

  static constexpr std::chrono::microseconds kLongestPause = std::chrono::milliseconds(50);

  ProcessEnvironment environment_;
  ProcessTimeouts timeouts_;
  Log log_;
  c10::intrusive_ptr<c10d::Backend> group_;
  std::map<std::vector<int64_t>, std::unique_ptr<NcclGroup>> gpus_;  ///< by everyone's GPU; null: not to be used
  bool broken_ = false;
  std::mutex watched_;
  std::string under_way_;  ///< the call that may wait; empty: none
  std::chrono::milliseconds longest_{};
  std::chrono::steady_clock::time_point since_;
  std::jthread watcher_{[this](const std::stop_token& done) { watch(done); }};  ///< last: it uses the others
};

// Gloo writes to its sockets without MSG_NOSIGNAL: a process that is lost would end the others by SIGPIPE, without a
// word. A handler that the program has set is left alone.
void survive_lost_connections() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL)
    std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::unique_ptr<Collectives> join_processes(const ProcessEnvironment& environment, ProcessTimeouts timeouts,
                                            const Log& log) {
  if (environment.size == 1) return nullptr;
  survive_lost_connections();
  return std::make_unique<GlooGroup>(environment, timeouts, log);
}

}  // namespace emend::devices
