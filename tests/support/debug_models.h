// Tiny random models of every family.
#pragma once

#include <ATen/Parallel.h>
#include <emend/core/error.h>
#include <emend/models/checkpoint.h>
#include <emend/models/family.h>
#include <emend/models/model.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/memory_checkpoint.h"

namespace emend::testing {

// Matrices this small gain nothing from threads, and threads that wait for each other on a busy machine cost seconds.
inline const bool kOneThread = (at::set_num_threads(1), true);

/// A debug flavour of a family ("llama", "plain"); the first flavour if none is named.
inline nlohmann::json debug_config(const std::string& family, const std::string& flavour = "") {
  const auto& spec = models::family_named(family);
  for (const auto& debug : spec.debug)
    if (flavour.empty() || debug.name == flavour) return nlohmann::json::parse(debug.config);
  throw Error(ErrorClass::kNotFound,
              {"debug models", "no flavour " + flavour + " of " + family, "one in its table", ""});
}

/// A random model; the same seed gives the same weights.
inline models::Model debug_model(const std::string& family, uint64_t seed = 1, const std::string& flavour = "",
                                 const models::LoadOptions& options = {}) {
  return models::load_model(models::random_checkpoint(debug_config(family, flavour), seed), options);
}

struct FamilyFlavour {
  std::string family, flavour;
};
/// All debug flavours of all families, for suites that loop over them.
inline std::vector<FamilyFlavour> all_flavours() {
  std::vector<FamilyFlavour> all;
  for (const auto& spec : models::all_families())
    for (const auto& debug : spec.debug) all.push_back({spec.name, debug.name});
  return all;
}
inline std::string flavour_name(const ::testing::TestParamInfo<FamilyFlavour>& info) {
  return info.param.family + "_" + info.param.flavour;
}

}  // namespace emend::testing
