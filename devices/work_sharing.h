// Work on independent items (facts, prompts) that several processes do together, each with its own copy of the model.
//
//   const auto group = devices::join_processes(environment);  // null where the process is alone
//   const auto sharing = group ? devices::WorkSharing(*group) : devices::WorkSharing();
//   auto results = sharing.map(costs, compute);   // everyone has all of them, in order
//
// Goals: the one place that knows who does what; every process ends up with the same results, so that whatever follows
// is the same everywhere; a failure in one process is the failure of all. Non-goals: balancing while the work goes on;
// work whose items depend on each other (every process then does all of it).
#pragma once

#include <emend/core/packed.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace emend::devices {

class Collectives;

/// Items begin…end−1.
struct ItemRange {
  size_t begin = 0, end = 0;
  [[nodiscard]] size_t size() const noexcept { return end - begin; }
};

/// Cuts items into `parts` runs of nearly equal cost and returns run `part`; runs may be empty. Costs of 0 count as 1.
/// A pure function: every process gets the same cuts.
[[nodiscard]] ItemRange share_of(std::span<const int64_t> costs, int parts, int part);

/// A handle, cheap to copy; the group must outlive it. Default: a process on its own, for which every function is what
/// its name says without any communication. All processes must make the same calls in the same order. Work that is
/// handed over must not use the group itself. If a process is lost, the others get Error(kDevice).
class WorkSharing {
 public:
  WorkSharing() = default;
  explicit WorkSharing(Collectives& group) noexcept : group_(&group) {}

  [[nodiscard]] bool alone() const noexcept { return group_ == nullptr; }
  [[nodiscard]] Collectives* group() const noexcept { return group_; }  ///< null for a process on its own
  [[nodiscard]] int processes() const noexcept;                         ///< 1 where the work is not shared
  [[nodiscard]] int rank() const noexcept;                              ///< number of this process, from 0
  /// True in the one process that writes files and speaks.
  [[nodiscard]] bool first() const noexcept { return rank() == 0; }

  /// Runs `work` here and returns everyone's bytes in the order of ranks. If it throws in any process, all throw: those
  /// in which it did their own exception, the others an Error of its class that names the process and quotes its text.
  [[nodiscard]] std::vector<std::string> exchange(const std::function<std::string()>& work) const;
  /// What `make` returns in the first process; it is not called in the others.
  [[nodiscard]] std::string by_first(const std::function<std::string()>& make) const {
    return exchange([&] { return first() ? make() : std::string(); })[0];
  }
  /// True if it is true in every process.
  [[nodiscard]] bool all(bool mine) const;
  /// True if every process gives the same bytes.
  [[nodiscard]] bool equal(std::string_view bytes) const;

  /// Results of all items, in their order, on every process. `work(range)` computes this process's share, a vector with
  /// one result an item; packed() carries it to the others. A process on its own just works.
  template <class Work>
  [[nodiscard]] auto map(std::span<const int64_t> costs, const Work& work) const {
    using Results = std::invoke_result_t<const Work&, ItemRange>;
    if (alone()) return work({0, costs.size()});
    Results mine;
    const auto shares = exchange([&] {
      const ItemRange range = share_of(costs, processes(), rank());
      if (range.size() > 0) mine = work(range);
      return packed(mine);
    });
    Results all;
    for (size_t r = 0; r < shares.size(); ++r) {
      auto part = static_cast<int>(r) == rank() ? std::move(mine) : unpacked<Results>(shares[r]);
      for (auto& result : part) all.push_back(std::move(result));
    }
    return all;
  }

 private:
  Collectives* group_ = nullptr;
};

}  // namespace emend::devices
