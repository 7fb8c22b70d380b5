// docs/adding-a-family.md shows a family; this compiles it and puts it through the conformance suite.
#include <emend/core/atomic_file.h>

#include <algorithm>

#include "support/family_suite.h"

namespace emend::models {

FamilySpec toy_family();

namespace {

class ToyFamily : public ::testing::Test {
 protected:
  FamilySpec family_ = toy_family();
  nlohmann::json config_ = nlohmann::json::parse(family_.debug.front().config);

  testing::FamilySuite suite() {
    LoadOptions options;
    options.family = &family_;
    return testing::FamilySuite(load_model(random_checkpoint(config_, 3, &family_), options));
  }
};

TEST_F(ToyFamily, TheGuideShowsThisVeryFile) {
  const std::filesystem::path root(EMEND_SOURCE_DIR);
  const std::string guide = read_file(root / "docs" / "adding-a-family.md"),
                    source = read_file(root / "tests" / "unit" / "toy_family.cpp");
  EXPECT_NE(guide.find("```cpp\n" + source + "```"), std::string::npos)
      << "copy tests/unit/toy_family.cpp into the guide";
  EXPECT_LT(std::count(source.begin(), source.end(), '\n'), 80);
}

TEST_F(ToyFamily, ConformsLikeTheOthers) {
  suite().every_site_fires();
  suite().every_site_can_be_edited();
  suite().packing_changes_nothing(2e-5);
  suite().restart_equals_whole(2e-5);
  suite().cache_equals_whole(2e-5);
  suite().edit_site_is_oriented(2e-5);
}

TEST_F(ToyFamily, SaysWhatItCannotDo) {
  config_["use_memory"] = true;
  EXPECT_THROW((void)parse_config(config_, "config.json", family_), Error);
  EXPECT_THROW((void)parse_config(config_, "config.json"), Error);  // not in families.def
}

}  // namespace
}  // namespace emend::models
