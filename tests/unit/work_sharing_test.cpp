// Cutting work into shares, and what a process on its own makes of it. Groups: device_collectives_test and
// processes_edit_test.
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/devices/work_sharing.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace emend::devices {
namespace work_sharing_test {

TEST(WorkSharing, SharesCoverEveryItemOnceInOrder) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const int parts = 1 + static_cast<int>(random() % 9);
    std::vector<int64_t> costs(random() % 40);
    for (auto& cost : costs) cost = static_cast<int64_t>(random() % 50);
    size_t next = 0;
    for (int part = 0; part < parts; ++part) {
      const ItemRange range = share_of(costs, parts, part);
      EXPECT_EQ(range.begin, next);
      EXPECT_GE(range.end, range.begin);
      next = range.end;
    }
    EXPECT_EQ(next, costs.size());
  }
}

TEST(WorkSharing, SharesAreEvenUpToOneItem) {
  std::mt19937 random(8);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<int64_t> costs(200);
    int64_t largest = 0;
    for (auto& cost : costs) largest = std::max(largest, cost = 1 + static_cast<int64_t>(random() % 30));
    const int64_t sum = std::accumulate(costs.begin(), costs.end(), int64_t{0});
    for (int parts : {2, 3, 8})
      for (int part = 0; part < parts; ++part) {
        const ItemRange range = share_of(costs, parts, part);
        const int64_t own = std::accumulate(costs.begin() + static_cast<std::ptrdiff_t>(range.begin),
                                            costs.begin() + static_cast<std::ptrdiff_t>(range.end), int64_t{0});
        EXPECT_LE(std::abs(own - sum / parts), largest + 1);
      }
  }
  const std::vector<int64_t> equal(6, 1);
  EXPECT_EQ(share_of(equal, 3, 1).begin, 2U);
  EXPECT_EQ(share_of(equal, 3, 1).end, 4U);
}

// What is neither sent nor received.
struct Kept {
  int number = 0;
};
void to_json(nlohmann::json&, const Kept&) {
  throw std::logic_error("nothing is sent");
}
void from_json(const nlohmann::json&, Kept&) {
  throw std::logic_error("nothing is received");
}

TEST(WorkSharing, AProcessOnItsOwnDoesEverythingItself) {
  const WorkSharing alone;
  EXPECT_TRUE(alone.alone());
  EXPECT_TRUE(alone.first());
  EXPECT_EQ(alone.processes(), 1);
  EXPECT_TRUE(alone.all(true));
  EXPECT_FALSE(alone.all(false));
  EXPECT_TRUE(alone.equal("x"));
  EXPECT_EQ(alone.by_first([] { return std::string("made"); }), "made");
  const std::vector<int64_t> costs(5, 1);
  const auto squares = alone.map(costs, [](ItemRange range) {
    std::vector<Kept> out;
    for (size_t i = range.begin; i < range.end; ++i) out.push_back({static_cast<int>(i * i)});
    return out;
  });
  EXPECT_EQ(mapped(squares, &Kept::number), (std::vector<int>{0, 1, 4, 9, 16}));
  EXPECT_THROW((void)alone.by_first([]() -> std::string {
    throw Error(ErrorClass::kNumeric, {"", "no", "", ""});
  }),
               Error);
}

}  // namespace work_sharing_test
}  // namespace emend::devices
