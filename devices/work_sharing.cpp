#include <c10/util/Exception.h>
#include <emend/core/error.h>
#include <emend/devices/collectives.h>
#include <emend/devices/work_sharing.h>

#include <algorithm>
#include <exception>

namespace emend::devices {
namespace {

// The first byte of what is exchanged: '+' before bytes, else the error's class before its text.
constexpr char kFine = '+';

}  // namespace

ItemRange share_of(std::span<const int64_t> costs, int parts, int part) {
  std::vector<int64_t> until(costs.size() + 1, 0);  // cost of the items before each
  for (size_t i = 0; i < costs.size(); ++i) until[i + 1] = until[i] + std::max<int64_t>(1, costs[i]);
  // The cut with the cost nearest to its share of the sum.
  const auto cut = [&](int number) -> size_t {
    const double wanted = static_cast<double>(until.back()) * number / parts;
    const auto above = std::lower_bound(until.begin(), until.end(), wanted,
                                        [](int64_t cost, double value) { return static_cast<double>(cost) < value; });
    auto at = static_cast<size_t>(above - until.begin());
    if (at > 0 && wanted - static_cast<double>(until[at - 1]) < static_cast<double>(until[at]) - wanted) --at;
    return at;
  };
  return {cut(part), cut(part + 1)};
}

int WorkSharing::processes() const noexcept {
  return group_ ? group_->size() : 1;
}
int WorkSharing::rank() const noexcept {
  return group_ ? group_->rank() : 0;
}

std::vector<std::string> WorkSharing::exchange(const std::function<std::string()>& work) const {
  if (!group_) return {work()};
  std::string mine;
  std::exception_ptr failure;
  const auto fail = [&](ErrorClass error_class, const std::string& text) {
    failure = std::current_exception();
    mine = static_cast<char>('A' + static_cast<int>(error_class)) + text;
  };
  try {
    mine = kFine + work();
  } catch (const Error& error) {
    fail(error.error_class(), error.what());
  } catch (const c10::Error& error) {
    fail(ErrorClass::kDevice, error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(ErrorClass::kDevice, error.what());
  }
  std::vector<std::string> all;
  try {
    all = group_->all_gather(std::string_view(mine));
  } catch (const Error&) {
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  if (failure) std::rethrow_exception(failure);
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty() || all[r][0] != kFine)
      throw Error(static_cast<ErrorClass>(all[r][0] - 'A'),
                  {"process " + std::to_string(r) + " of " + std::to_string(all.size()), all[r].substr(1), "", ""});
    all[r].erase(0, 1);
  }
  return all;
}

bool WorkSharing::all(bool mine) const {
  return std::ranges::count(exchange([&] { return std::string(mine ? "1" : "0"); }), "0") == 0;
}

bool WorkSharing::equal(std::string_view bytes) const {
  const auto everyones = exchange([&] { return std::string(bytes); });
  return std::ranges::all_of(everyones, [&](const std::string& other) { return other == bytes; });
}

}  // namespace emend::devices
