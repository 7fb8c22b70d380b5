// numpy's archives, and the second moments that are published in them (fixtures: tests/fixtures/npz/make.py).
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/npz.h>
#include <emend/editors/steps/statistics.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace npz_test {

std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path(EMEND_SOURCE_DIR) / "tests" / "fixtures" / "npz" / name;
}

at::Tensor expected_moment() {
  const at::Tensor rows = at::arange(12, at::kDouble).view({4, 3}) / 8;
  return (rows.mm(rows.t()) + at::eye(4, at::kDouble)).to(at::kFloat);
}

using testing::error_of;

TEST(Npz, ReadsStoredAndDeflatedArrays) {
  for (const char* name : {"moment.npz", "moment_deflated.npz"}) {
    const NpzFile file(fixture(name));
    EXPECT_EQ(file.names(), (std::vector<std::string>{"mom2.constructor", "mom2.count", "mom2.mom2", "sample_size"}));
    EXPECT_TRUE(file.contains("mom2.mom2"));
    EXPECT_TRUE(at::equal(file.read("mom2.mom2"), expected_moment())) << name;
    EXPECT_EQ(file.read("mom2.count").item<int64_t>(), 120);
    EXPECT_EQ(file.read("mom2.count").dim(), 0);
  }
}

TEST(Npz, ReadsOrdersTypesAndEmptyArrays) {
  const NpzFile file(fixture("kinds.npz"));
  EXPECT_TRUE(at::equal(file.read("fortran"), at::arange(6, at::kDouble).view({2, 3})));
  EXPECT_TRUE(at::equal(file.read("integers"), at::arange(5)));
  EXPECT_TRUE(at::equal(file.read("flags"), at::tensor({1, 0}).to(at::kBool)));
  EXPECT_EQ(file.read("scalar").item<float>(), 2.5F);
  EXPECT_EQ(file.read("empty").sizes(), (std::vector<int64_t>{0, 3}));
}

TEST(Npz, SaysWhatItCannotRead) {
  error_of([] { (void)NpzFile(fixture("kinds.npz")).read("big_endian"); }, ErrorClass::kUnsupported);
  error_of([] { (void)NpzFile(fixture("moment.npz")).read("mom2.constructor"); }, ErrorClass::kUnsupported);
  error_of([] { (void)NpzFile(fixture("moment.npz")).read("mom2"); }, ErrorClass::kNotFound);
  error_of([] { (void)NpzFile(fixture("absent.npz")); }, ErrorClass::kNotFound);
  error_of([] { (void)NpzFile(fixture("make.py")); }, ErrorClass::kCorruption);
}

// Every single damaged byte and every shortened file is noticed or does no harm; none crashes.
TEST(Npz, DamageIsNoticed) {
  const testing::TemporaryFolder folder("npz");
  for (const char* name : {"moment.npz", "moment_deflated.npz"}) {
    const std::string whole = read_file(fixture(name));
    const auto path = folder.path() / name;
    const auto read = [&] {
      try {
        return at::equal(NpzFile(path).read("mom2.mom2"), expected_moment());
      } catch (const Error&) {
        return true;
      }
    };
    for (size_t at = 0; at < whole.size(); at += 3) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
      write_file(path, damaged);
      EXPECT_TRUE(read()) << name << ": another moment after a change of byte " << at;
    }
    for (size_t length = 0; length < whole.size(); length += 41) {
      write_file(path, whole.substr(0, length));
      EXPECT_THROW((void)NpzFile(path).read("mom2.mom2"), Error) << name << " cut to " << length;
    }
  }
}

TEST(PublishedStatistics, AreCheckedAgainstTheModel) {
  const auto moment = editors::read_published_moment(fixture("moment.npz"));
  EXPECT_EQ(moment.count(), 120);
  EXPECT_LT(testing::relative_difference(moment.cov_FF(), expected_moment() / 120), 1e-7) << "the file has the sum";
  const models::Model model = testing::tiny_model();
  const auto statistics = editors::make_published_statistics(fixture("moment.npz").string());
  error_of([&] { statistics->prepare(model, {1}); }, ErrorClass::kInvalidArgument);     // another width
  error_of([&] { statistics->prepare(model, {1, 2}); }, ErrorClass::kInvalidArgument);  // no {layer}
  const auto absent = editors::make_published_statistics("layer{layer}.npz");
  error_of([&] { absent->prepare(model, {1, 2}); }, ErrorClass::kNotFound);
  error_of([&] { (void)absent->get(1); }, ErrorClass::kInvalidArgument);
}

}  // namespace npz_test
}  // namespace emend
