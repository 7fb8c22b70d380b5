// The group of one, and the choice between it and the real one.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/collectives.h>
#include <emend/devices/detail/gloo_group.h>

#include <csignal>

namespace emend::devices {
namespace {

class Alone final : public Collectives {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  [[nodiscard]] int local_rank() const noexcept override { return 0; }
  void all_reduce_sum(at::Tensor&) override {}
  void broadcast(at::Tensor&, int root) override { detail::require_root(root, 1); }
  [[nodiscard]] std::vector<at::Tensor> all_gather(const at::Tensor& tensor) override { return {tensor.clone()}; }
  [[nodiscard]] std::vector<std::string> all_gather(std::string_view bytes) override { return {std::string(bytes)}; }
  void barrier() override {}
};

}  // namespace

namespace detail {
void require_root(int root, int size) {
  if (root < 0 || root >= size)
    throw Error(ErrorClass::kInvalidArgument,
                {"broadcast", "root " + std::to_string(root), "a rank from 0 to " + std::to_string(size - 1), ""});
}
}  // namespace detail

namespace {

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
  if (environment.size == 1) return std::make_unique<Alone>();
  survive_lost_connections();
  return detail::join_gloo(environment, timeouts, log);
}

}  // namespace emend::devices
